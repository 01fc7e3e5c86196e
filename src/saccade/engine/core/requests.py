"""The active requests: their arrival, their samples, their ends, and their output."""

import time
from collections import defaultdict
from dataclasses import dataclass

import structlog

from saccade.engine.core.counters import Counters
from saccade.engine.core.frame_builder import FrameBuilder
from saccade.engine.core.grammars import Grammars, NoGrammars
from saccade.engine.core.kv_connector import KvConnector
from saccade.engine.core.pixel_requests import PixelRequests
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import StepOutput
from saccade.engine.core.step_builder import PlannedStep
from saccade.errors import SaccadeError
from saccade.protocol.kv_transfer import SendKv
from saccade.protocol.output import Failure, FinishReason, TokenDelta, TokenLogprob
from saccade.protocol.request import EngineRequest, SupplyPixels

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class _RequestState:
    """The *live* samples by index, and the indices of the samples that have not started."""

    live: dict[int, Sequence]
    unstarted: list[int]


class Requests:
    """Requests by connection and request_id.

    A request with n samples is one sequence until its prompt is computed and its first token is drawn. The other
    samples are then queued as separate sequences, directly after the first by arrival. They reuse the full blocks of
    the prompt from the prefix cache, so each computes at most one block and draws its own first token. Without a prefix
    cache each sample computes the whole prompt again; its images are not encoded again while the encoder cache has room
    for them. If the prompt's state is received, all samples are sequences from the start, and begin together. Slots are
    released when the last sample ends. *frames* collects the output. *kv_connector* hears of every drawn token.
    """

    def __init__(
        self, scheduler: Scheduler, validator: RequestValidator, grammars: Grammars | NoGrammars, counters: Counters
    ) -> None:
        self.frames = FrameBuilder()
        self.pixels = PixelRequests(scheduler, self.frames)
        self.kv_connector = KvConnector()
        self.grammars = grammars
        self._scheduler = scheduler
        self._validator = validator
        self._counters = counters
        self._open: dict[int, dict[str, _RequestState]] = defaultdict(dict)
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether there is output, a request for pixels has expired, or a grammar is being compiled."""
        return bool(self.frames) or self.pixels.overdue or bool(self.grammars.pending)

    def close(self) -> None:
        """End transfers, and give up grammars that are not compiled yet."""
        if self.kv_connector.transfers is not None:
            self.kv_connector.transfers.close()
        self.grammars.close()

    def samples(self, connection: int, request_id: str) -> list[Sequence]:
        """Return the samples that are sequences now; all share the same images and pixels."""
        request = self._find(connection, request_id)
        return [] if request is None else list(request.live.values())

    def submit(self, connection: int, request: EngineRequest) -> None:
        """Queue a request; if it is invalid, its only delta is the error."""
        slots = [item.slot.name for item in request.media if item.slot is not None]
        if self._find(connection, request.request_id) is not None:
            logger.warning(
                "dropped a request with a duplicate id", request_id=request.request_id, connection=connection
            )
            self.frames.released_slots(connection).extend(slots)
            return
        self._num_arrived += 1
        try:
            self._scheduler.check_queue()
            sequence = self._validator.validated(connection, request, self._num_arrived)
            if sequence.grammar is not None:
                self.grammars.begin(sequence, sequence.grammar)
            self.kv_connector.open(sequence)
        except SaccadeError as error:
            self.frames.released_slots(connection).extend(slots)
            self.refuse(connection, request.request_id, error)
            return
        sequence.clock.arrived = time.perf_counter()
        sequence.max_num_tokens = min(sequence.max_num_tokens, self._validator.max_model_len)
        self._num_arrived += request.num_samples - 1
        if not sequence.awaits_kv:  # else the prefill worker counts them
            self._counters.prompt_tokens_total += sequence.num_prompt_tokens
        self._open_samples(sequence, request.num_samples)

    def _open_samples(self, sequence: Sequence, num_samples: int) -> None:
        """Queue the first sample of a request; num_samples arrival numbers are reserved from this sample's on."""
        request = _RequestState({0: sequence}, list(range(1, num_samples)))
        self._open[sequence.connection][sequence.request_id] = request
        if sequence.awaits_kv:
            sequence.forks = [self._sample(sequence, index) for index in request.unstarted]
            request.live.update((sample.index, sample) for sample in sequence.forks)
            request.unstarted.clear()
        elif num_samples > 1:
            self._scheduler.encoder_scheduler.hold(sequence)
        self._scheduler.add(sequence)

    def take_grammars(self, timeout_seconds: float) -> None:
        """Queue the requests whose grammar is compiled, and fail those with an error; wait for one."""
        for ready in self.grammars.take(self.samples, timeout_seconds) if self.grammars.pending else ():
            for sequence in self.samples(ready.connection, ready.request_id):
                if ready.error is not None:
                    self.fail(sequence, ready.error)
                elif sequence in self._scheduler.parked:
                    self._scheduler.resume(sequence)

    def refuse(self, connection: int, request_id: str, error: SaccadeError) -> None:
        """Send an error for a request that never became a sequence."""
        self.frames.say(connection, TokenDelta(request_id, [], FinishReason.ERROR, failure=_failure(error)))

    def commit(self, schedule: Schedule, plan: PlannedStep, output: StepOutput) -> None:
        """Record that a step was executed: sequences get their tokens, and those that are complete end.

        Sequences that have ended since the step was planned get nothing.
        """
        now = time.perf_counter()
        for sequence, logprobs in zip(plan.prompts, output.prompt_logprobs, strict=bool(output.prompt_logprobs)):
            sequence.prompt_logprobs = (sequence.prompt_logprobs or []) + logprobs
        logprobs_of = output.logprobs or [None] * len(output.token_ids)
        results = zip(plan.drawing, output.token_ids, logprobs_of, strict=bool(output.token_ids))
        draws = [result for result in results if result[0].finish_reason is None]
        for sequence, _, _ in draws:
            if sequence.num_generated_tokens == 0:
                sequence.clock.first_token = now
                # Before the commit, which unpins the encoder outputs that the request's other samples also need.
                self._start_samples(sequence)
        if num_tokens := self._scheduler.commit(schedule):
            self._counters.count_step(num_tokens)
        self._counters.generated_tokens_total += len(draws)
        self._counters.batch_seconds_total += output.batch_seconds
        self._counters.network_seconds_total += output.network_seconds
        for sequence, token_id, logprob in draws:
            sequence.token_ids.append(token_id)
            reason = self.finish_reason(sequence, token_id)
            if not self.kv_connector.keep(sequence, logprob, reason, now):
                self.answer(sequence, logprob, reason, now)

    def finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Return why *sequence* ends with *token_id*, its newest token; None if it goes on."""
        if sequence.matcher is not None:
            sequence.matcher.take(token_id)
            if sequence.matcher.is_finished:
                return FinishReason.STOP
        if token_id in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_tokens >= sequence.max_num_tokens else None

    def _start_samples(self, sequence: Sequence) -> None:
        """Queue the samples that wait for the prompt of *sequence*. Call before its first token is added."""
        request = self._open[sequence.connection][sequence.request_id]
        samples = [self._sample(sequence, index) for index in request.unstarted]
        for sample in samples:
            # Sample 0 already reports the cached tokens of the request.
            sample.num_cached_tokens = 0
            sample.completes_prompt = isinstance(sequence.request.kv_transfer, SendKv)
        request.live.update((sample.index, sample) for sample in samples)
        request.unstarted.clear()
        self._scheduler.add_samples(sequence, samples)

    def answer(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> None:
        """Send the newest token of *sequence*; with a *reason*, the sequence ends."""
        first = sequence.num_generated_tokens == 1
        delta = TokenDelta(
            sequence.request_id,
            sequence.token_ids[-1:],
            reason,
            sequence.num_cached_tokens or 0 if first else 0,
            index=sequence.index,
            logprobs=[] if logprob is None else [logprob],
            prompt_logprobs=sequence.prompt_logprobs or [] if first else [],
            times=None if reason is None else sequence.clock.times(now),
        )
        self.frames.say(sequence.connection, delta)
        if reason is not None:
            self._end(sequence, reason)

    def supply(self, connection: int, answer: SupplyPixels) -> None:
        """Accept the pixels that were requested from a gateway. If the request has ended, its slots are released."""
        self.pixels.take(connection, answer, self.samples(connection, answer.request_id), self.fail)

    def abort(self, connection: int, request_id: str, index: int | None = None) -> None:
        """End a request, or its sample *index*, without further work. An unknown request is ignored."""
        request = self._find(connection, request_id)
        if request is None:
            return
        for other in [other for other in request.unstarted if index in (None, other)]:
            request.unstarted.remove(other)
            self.frames.say(connection, TokenDelta(request_id, [], FinishReason.ABORT, index=other))
        for sequence in [live for live in request.live.values() if index in (None, live.index)]:
            times = sequence.clock.times(time.perf_counter())
            delta = TokenDelta(request_id, [], FinishReason.ABORT, index=sequence.index, times=times)
            self.frames.say(connection, delta)
            self._end(sequence, FinishReason.ABORT)

    def hangup(self, connection: int) -> None:
        """End all requests of a closed connection, and discard its output."""
        for request_id in list(self._open.get(connection, ())):
            self.abort(connection, request_id)
        self._open.pop(connection, None)
        self.frames.forget(connection)

    def fail(self, sequence: Sequence, error: SaccadeError) -> list[Sequence]:
        """End the whole request of *sequence* with one error; return its samples, or none if it has already ended."""
        request = self._find(sequence.connection, sequence.request_id)
        if request is None or sequence.finish_reason is not None:
            return []
        request.unstarted.clear()
        times = sequence.clock.times(time.perf_counter())
        delta = TokenDelta(
            sequence.request_id,
            [],
            FinishReason.ERROR,
            failure=_failure(error),
            index=sequence.index,
            times=times,
        )
        self.frames.say(sequence.connection, delta)
        samples = list(request.live.values())
        for sample in samples:
            self._end(sample, FinishReason.ERROR)
        return samples

    def fail_in(self, schedule: Schedule, sequence: Sequence, error: SaccadeError) -> None:
        """End the whole request of *sequence*, and remove its samples from *schedule*."""
        for sample in self.fail(sequence, error):
            schedule.chunks.pop(sample, None)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = self._open[sequence.connection][sequence.request_id]
        sequence.finish_reason = reason
        del request.live[sequence.index]
        if request.unstarted:
            # The sequence ends before its first token, which the other samples wait for: the next sample takes its
            # place.
            following = self._sample(sequence, request.unstarted.pop(0))
            request.live[following.index] = following
            self._scheduler.encoder_scheduler.hold(following)
            self._scheduler.add_samples(sequence, [following])
        self._scheduler.remove(sequence)
        if not request.live:
            for image in sequence.images:
                image.release(self.frames.released_slots(sequence.connection))
            del self._open[sequence.connection][sequence.request_id]

    def _find(self, connection: int, request_id: str) -> _RequestState | None:
        return self._open.get(connection, {}).get(request_id)

    @staticmethod
    def _sample(sequence: Sequence, index: int) -> Sequence:
        return sequence.sample(index, sequence.arrival + index - sequence.index)


def _failure(error: SaccadeError) -> Failure:
    return Failure(error.code, error.message, error.param)
