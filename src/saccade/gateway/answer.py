"""An answer on its way from a worker: deltas to pieces of its samples, usage, and what is measured and logged of it."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Self

from saccade.errors import WorkerFailed, from_code
from saccade.gateway.access_log import line_of_request
from saccade.gateway.openai_answers import CompletionTokensDetails, PromptTokensDetails, Usage
from saccade.gateway.openai_requests import ChatRequest
from saccade.gateway.sample import Piece, Sample, samples_of
from saccade.gateway.served_model import ServedModel
from saccade.gateway.workers import Worker
from saccade.protocol.output import FinishReason, SampleTimes, TokenDelta, TokenLogprob
from saccade.telemetry import ENGINE_STAGES, Metrics


class Answer:
    """The answer to *request*, from before its prompt is prepared: its clock starts when it is made.

    A context manager: when the block ends, whether the answer did or not, it is measured and logged. begin() and
    sent_to() come before pieces().
    """

    def __init__(self, request: ChatRequest, served: ServedModel, metrics: Metrics) -> None:
        self.request = request
        self.served = served
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.samples = samples_of(request, served)
        self.prompt_token_ids: list[int] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self._worker: Worker | None = None
        self._num_cached_tokens = 0
        self._metrics = metrics
        self._itl_seconds = metrics.itl_seconds.labels(served.name)
        self._begun_at = time.perf_counter()
        self._ttft_seconds: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._worker is None:
            return
        unfinished = FinishReason.ERROR if kind is not None and issubclass(kind, Exception) else FinishReason.ABORT
        reasons = [sample.finish_reason or unfinished.value for sample in self.samples]
        self._measure(reasons)
        self._note(self._worker.url, reasons)

    def begin(self, prompt: list[int]) -> None:
        """Note the token ids of the prompt that is answered."""
        self.prompt_token_ids = prompt
        for sample in self.samples:
            sample.begin(prompt)

    def sent_to(self, worker: Worker) -> None:
        """Note who answers."""
        self._worker = worker

    async def pieces(self, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[Piece]:
        """Yield the text of each delta, "" included, until every sample is finished; one that a stop string ends is
        given up by the worker. Raises what the engine reports, WorkerFailed where it breaks off.
        """
        num_open = len(self.samples)
        async for delta in deltas:
            sample = self._sample(delta)
            if sample.finish_reason is not None:
                # On its way already when the sample was given up.
                self._observe_times(delta.times)
                continue
            piece = sample.take(delta)
            self._observe(sample, delta)
            if sample.finish_reason is not None:
                num_open -= 1
                if num_open and delta.finish_reason is None and self._worker is not None:
                    self._worker.abort_sample(self.id, sample.index)
                if not num_open:
                    self._metrics.e2e_seconds.labels(self.served.name).observe(time.perf_counter() - self._begun_at)
            yield piece
            if not num_open:
                return
        raise WorkerFailed("The worker ended the answer without saying why.")

    @property
    def usage(self) -> Usage:
        """Tokens so far: the prompt's once, those of all samples together."""
        num_prompt_tokens = len(self.prompt_token_ids)
        num_completion_tokens = sum(sample.num_tokens for sample in self.samples)
        num_reasoning_tokens = sum(sample.num_reasoning_tokens for sample in self.samples)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
        )

    def _sample(self, delta: TokenDelta) -> Sample:
        if delta.failure is not None:
            raise from_code(delta.failure.code, delta.failure.message, delta.failure.param)
        if not 0 <= delta.index < len(self.samples):
            raise WorkerFailed("The worker sent an answer that was not asked for.")
        if delta.index == 0:
            self._num_cached_tokens += delta.num_cached_tokens
            self.prompt_logprobs += delta.prompt_logprobs
        return self.samples[delta.index]

    def _observe(self, sample: Sample, delta: TokenDelta) -> None:
        if delta.token_ids:
            now = time.perf_counter()
            if sample.first_token_at:
                self._itl_seconds.observe(now - sample.last_token_at)
            else:
                sample.first_token_at = now
                if self._ttft_seconds is None:
                    self._ttft_seconds = now - self._begun_at
                    self._metrics.ttft_seconds.labels(self.served.name).observe(self._ttft_seconds)
            sample.last_token_at = now
        if delta.times is not None:
            self._observe_times(delta.times)

    def _observe_times(self, times: SampleTimes | None) -> None:
        if times is not None:
            seconds = {stage: getattr(times, f"{stage}_seconds") for stage in ENGINE_STAGES}
            self._metrics.answers.observe_engine(self.served.name, seconds)

    def _measure(self, reasons: Sequence[str]) -> None:
        model, answers = self.served.name, self._metrics.answers
        answers.prompt_tokens.labels(model).observe(len(self.prompt_token_ids))
        answers.asked_samples.labels(model).observe(len(self.samples))
        asked_tokens = self.request.max_completion_tokens or self.request.max_tokens
        if asked_tokens is not None:
            answers.asked_tokens.labels(model).observe(asked_tokens)
        for sample, reason in zip(self.samples, reasons, strict=True):
            answers.success_total.labels(model, reason).inc()
            answers.generation_tokens.labels(model).observe(sample.num_tokens)
            if sample.num_tokens > 1:
                tpot_seconds = (sample.last_token_at - sample.first_token_at) / (sample.num_tokens - 1)
                answers.tpot_seconds.labels(model).observe(tpot_seconds)

    def _note(self, worker: str, reasons: list[str]) -> None:
        """Put the answer into its request's log line, which so binds the request's id to the one the engine knows."""
        line = line_of_request()
        if line is None:
            return
        line.id = self.id
        line.model = self.served.name
        line.worker = worker
        line.prompt_tokens = len(self.prompt_token_ids)
        line.cached_tokens = self._num_cached_tokens
        line.completion_tokens = sum(sample.num_tokens for sample in self.samples)
        line.finish_reasons = reasons
        line.ttft_seconds = None if self._ttft_seconds is None else round(self._ttft_seconds, 4)
