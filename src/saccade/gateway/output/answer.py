"""Turns a worker's deltas into the chunks of an answer, and records the answer's tokens, metrics and log line."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Self

from msgspec import UNSET, Struct, UnsetType

from saccade.errors import WorkerFailed, from_code
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.output.choice import AnswerChunk, GeneratedChoice, choices_of
from saccade.gateway.served_models.served_model import ServedModel
from saccade.gateway.server.access_log import line_of_request
from saccade.gateway.tenants.account import Account
from saccade.protocol.media import ImageLayout, Span
from saccade.protocol.output import FinishReason, SampleTimes, TokenDelta, TokenLogprob
from saccade.telemetry import Metrics
from saccade.tracing.trace import TRACE

CHARGE_TOKENS = 64
"""While an answer grows, the tenant is charged after at most this many tokens."""


class ImageUsage(Struct, frozen=True):
    """A prompt's image or video as the model sees it: the resized size in pixels, and its *tokens*.

    The size includes padding and covers all tiles together. *patch* is a patch's edge in pixels. Only a video has
    *frames*. *cached* is true if all *tokens* were in the prefix cache, and absent otherwise.
    """

    width: int
    height: int
    tokens: int
    patch: int
    frames: int | UnsetType = UNSET
    cached: bool | UnsetType = UNSET

    @classmethod
    def of_layout(cls, layout: ImageLayout, spans: Sequence[Span], num_cached_tokens: int) -> "ImageUsage":
        """Return the usage of the image or video with *layout*, whose tokens are in *spans*."""
        return cls(
            width=layout.resized_width,
            height=layout.resized_height,
            tokens=layout.num_tokens,
            patch=layout.resized_height // layout.grid[1],
            frames=len(layout.frames) or UNSET,
            cached=spans[-1].start + spans[-1].length <= num_cached_tokens or UNSET,
        )


class MediaUsage(Struct, frozen=True, kw_only=True):
    """A prompt's *images* and videos in order, and their tokens; empty for a prompt without any."""

    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    images: list[ImageUsage] | UnsetType = UNSET


class PromptTokensDetails(MediaUsage, frozen=True):
    """How many of the prompt's tokens were in the prefix cache, and how many belong to images and videos."""

    cached_tokens: int = 0


class CompletionTokensDetails(Struct, frozen=True):
    """How many of the answer's tokens are reasoning, shown or not."""

    reasoning_tokens: int = 0


class Usage(Struct, frozen=True):
    """A request's token counts; *prompt_tokens* includes image tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenCounts:
    """Sums the tokens of *num_choices* choices, and recounts only the choices that *changed* since the last sum.

    So an answer with n choices that sends its usage with every chunk does not recount all choices each time.
    """

    def __init__(self, num_choices: int) -> None:
        self.changed: set[GeneratedChoice] = set()
        self._counts = [(0, 0)] * num_choices
        self._num_tokens = self._num_reasoning_tokens = 0

    def sums(self) -> tuple[int, int]:
        """Return the total number of tokens, and how many of them are reasoning."""
        for choice in self.changed:
            num_tokens, num_reasoning_tokens = self._counts[choice.index]
            self._counts[choice.index] = choice.num_tokens, choice.num_reasoning_tokens
            self._num_tokens += choice.num_tokens - num_tokens
            self._num_reasoning_tokens += choice.num_reasoning_tokens - num_reasoning_tokens
        self.changed.clear()
        return self._num_tokens, self._num_reasoning_tokens


class Answer:
    """The answer to *chat* with the parameters of *request*; *account* is charged for it.

    *prompt* holds the prompt's token ids, and *images* the layout and spans of each image and video. The request began
    at *begun_at*, in seconds of the process's clock. As a context manager, it measures and logs the answer when the
    block ends, complete or not, if sent_to() has named a worker.
    """

    def __init__(
        self,
        request: ChatRequest,
        chat: Chat,
        served: ServedModel,
        prompt: list[int],
        images: Sequence[tuple[ImageLayout, Sequence[Span]]],
        *,
        metrics: Metrics,
        account: Account,
        begun_at: float,
    ) -> None:
        self.request = request
        self.served = served
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.choices = choices_of(request, chat, served, prompt)
        self.prompt_token_ids = prompt
        self.prompt_logprobs: list[TokenLogprob] = []
        self._images = images
        self._details: PromptTokensDetails | None = None
        self._worker: str | None = None
        self._abort_sample: Callable[[int], None] | None = None
        self._num_cached_tokens = 0
        self._metrics = metrics
        self._account = account
        self._itl_seconds = metrics.itl_seconds.labels(served.name)
        # Deltas come in the context of their connection.
        self._trace = TRACE.get()
        self._begun_at = begun_at
        self._ttft_seconds: float | None = None
        self._num_open = len(self.choices)
        self._num_charged = self._num_uncharged = 0
        self._counts = TokenCounts(len(self.choices))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # It leads to an object that has this one.
        self._abort_sample = None
        if self._worker is None:
            return
        unfinished = FinishReason.ERROR if kind is not None and issubclass(kind, Exception) else FinishReason.ABORT
        self._charge()
        reasons = [choice.finish_reason or unfinished.value for choice in self.choices]
        self._measure(reasons)
        self._note(self._worker, reasons)

    def sent_to(self, worker: str, abort_sample: Callable[[int], None]) -> None:
        """Note that *worker*, the URL of one worker or of both in a pair, answers now.

        *abort_sample* stops one choice.
        """
        self._worker = worker
        self._abort_sample = abort_sample

    @property
    def is_whole(self) -> bool:
        """Whether every choice is finished."""
        return not self._num_open

    def take_delta(self, delta: TokenDelta) -> AnswerChunk | None:
        """Return the chunk for *delta*, or None if its choice had already finished.

        If a choice ends here before the worker has ended it, and others are unfinished, this aborts it at the worker.
        Raises the engine's error, and WorkerFailed for an unexpected delta.
        """
        now = time.perf_counter()
        choice = self._choice(delta)
        if choice.finish_reason is not None:
            # The worker had sent it before it received the abort.
            self._observe_times(delta.times)
            return None
        chunk = choice.take_delta(delta)
        self._counts.changed.add(choice)
        self._observe(choice, delta, now)
        self._num_uncharged += len(delta.token_ids)
        if self._num_uncharged >= CHARGE_TOKENS:
            self._charge()
        if choice.finish_reason is not None:
            self._num_open -= 1
            if self._num_open and delta.finish_reason is None and self._abort_sample is not None:
                self._abort_sample(choice.index)
            if self.is_whole:
                self._metrics.e2e_seconds.labels(self.served.name).observe(time.perf_counter() - self._begun_at)
        return chunk

    @property
    def usage(self) -> Usage:
        """The tokens so far: the prompt's, and the sum over all choices."""
        num_prompt_tokens = len(self.prompt_token_ids)
        num_completion_tokens, num_reasoning_tokens = self._counts.sums()
        if self._details is None:
            self._details = self._prompt_details()
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=self._details,
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
        )

    def _prompt_details(self) -> PromptTokensDetails:
        num_cached = self._num_cached_tokens
        if not self._images:
            return PromptTokensDetails(num_cached)
        images = [ImageUsage.of_layout(layout, spans, num_cached) for layout, spans in self._images]
        num_video_tokens = sum(image.tokens for image in images if image.frames)
        num_image_tokens = sum(image.tokens for image in images) - num_video_tokens
        return PromptTokensDetails(
            num_cached, image_tokens=num_image_tokens, video_tokens=num_video_tokens, images=images
        )

    def _charge(self) -> None:
        num_tokens, _ = self._counts.sums()
        self._account.use_answer(num_tokens - self._num_charged, self.served.name)
        self._num_charged, self._num_uncharged = num_tokens, 0

    def _choice(self, delta: TokenDelta) -> GeneratedChoice:
        if delta.failure is not None:
            raise from_code(delta.failure.code, delta.failure.message, delta.failure.param)
        if not 0 <= delta.index < len(self.choices):
            raise WorkerFailed("The worker sent an answer that was not asked for.")
        if delta.index == 0 and (delta.num_cached_tokens or delta.prompt_logprobs):
            self._take_prompt(delta)
        return self.choices[delta.index]

    def _take_prompt(self, delta: TokenDelta) -> None:
        """Note the prompt's cached tokens and log probabilities that *delta* reports."""
        num_others = len(self.prompt_token_ids) - self._num_cached_tokens
        num_cached_tokens = max(0, min(delta.num_cached_tokens, num_others))
        if num_cached_tokens:
            self._num_cached_tokens += num_cached_tokens
            self._details = None
            self._account.use_cached(num_cached_tokens, self.served.name)
        self.prompt_logprobs += delta.prompt_logprobs

    def _observe(self, choice: GeneratedChoice, delta: TokenDelta, now: float) -> None:
        if delta.token_ids:
            if choice.first_token_at:
                self._itl_seconds.observe(now - choice.last_token_at)
            else:
                choice.first_token_at = now
                if self._ttft_seconds is None:
                    self._ttft_seconds = now - self._begun_at
                    self._metrics.ttft_seconds.labels(self.served.name).observe(self._ttft_seconds)
                    if self._trace is not None:
                        self._trace.note_first_token()
            choice.last_token_at = now
        if delta.times is not None:
            self._observe_times(delta.times)

    def _observe_times(self, times: SampleTimes | None) -> None:
        if times is not None:
            self._metrics.answers.observe_engine(self.served.name, times.by_stage)
            if self._trace is not None:
                self._trace.add_engine(times.by_stage)

    def _measure(self, reasons: Sequence[str]) -> None:
        model, answers = self.served.name, self._metrics.answers
        answers.prompt_tokens.labels(model).observe(len(self.prompt_token_ids))
        answers.asked_samples.labels(model).observe(len(self.choices))
        answers.most_tokens.labels(model).observe(max(choice.num_tokens for choice in self.choices))
        asked_tokens = self.request.max_answer_tokens
        if asked_tokens is not None:
            answers.asked_tokens.labels(model).observe(asked_tokens)
        for choice, reason in zip(self.choices, reasons, strict=True):
            answers.success_total.labels(model, reason).inc()
            answers.generation_tokens.labels(model).observe(choice.num_tokens)
            if choice.num_tokens > 1:
                tpot_seconds = (choice.last_token_at - choice.first_token_at) / (choice.num_tokens - 1)
                answers.tpot_seconds.labels(model).observe(tpot_seconds)

    def _note(self, worker: str, reasons: list[str]) -> None:
        """Record the answer in its request's log line, with its id, its model and its *worker*."""
        line = line_of_request()
        if line is None:
            return
        line.id = self.id
        line.model = self.served.name
        line.worker = worker
        # A request may have several prompts, each with an answer.
        line.images = (line.images or 0) + len(self._images) or None
        line.prompt_tokens = (line.prompt_tokens or 0) + len(self.prompt_token_ids)
        line.cached_tokens = (line.cached_tokens or 0) + self._num_cached_tokens
        num_tokens = sum(choice.num_tokens for choice in self.choices)
        line.completion_tokens = (line.completion_tokens or 0) + num_tokens
        line.finish_reasons = [*(line.finish_reasons or ()), *reasons]
        line.ttft_seconds = None if self._ttft_seconds is None else round(self._ttft_seconds, 4)
