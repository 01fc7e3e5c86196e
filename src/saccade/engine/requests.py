"""The requests under way: their samples, how each ends, and what is said of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from saccade.engine.outbox import Outbox
from saccade.engine.scheduler import Scheduler
from saccade.engine.sequence import Sequence
from saccade.errors import SaccadeError
from saccade.protocol.output import Failure, FinishReason, TokenDelta, TokenLogprob


@dataclass(slots=True)
class _Request:
    """*live* samples by index, and the indices of those that have not started."""

    live: dict[int, Sequence]
    unstarted: list[int]


class Requests:
    """Requests by (connection, request_id).

    A request with n samples is one sequence until its prompt is computed and its first token drawn. The other samples
    are then queued as sequences of their own, right behind the first by arrival. They find the prompt's full blocks in
    the prefix cache, so each computes at most one block, and draws its own first token. Without a prefix cache each
    computes the whole prompt again, though no picture is encoded twice. Slots are given up when the last sample ends.
    *outbox* holds what is to be said. *on_end* is called with the connection and id of each request that has ended.
    """

    def __init__(self, scheduler: Scheduler, on_end: Callable[[int, str], None]) -> None:
        self.outbox = Outbox()
        self._on_end = on_end
        self._scheduler = scheduler
        self._open: dict[tuple[int, str], _Request] = {}

    def __contains__(self, key: tuple[int, str]) -> bool:
        return key in self._open

    def samples(self, connection: int, request_id: str) -> list[Sequence]:
        """Return the samples that are sequences now; all show the same pictures from the same pixels."""
        request = self._open.get((connection, request_id))
        return [] if request is None else list(request.live.values())

    def open(self, sequence: Sequence, num_samples: int) -> None:
        """Queue the first sample of a request. Its arrival and the num_samples - 1 numbers behind are the request's."""
        self._open[sequence.connection, sequence.request_id] = _Request({0: sequence}, list(range(1, num_samples)))
        if num_samples > 1:
            self._scheduler.encodings.hold(sequence)
        self._scheduler.add(sequence)

    def refuse(self, connection: int, request_id: str, error: SaccadeError) -> None:
        """Answer a request that never became a sequence."""
        self.outbox.say(connection, TokenDelta(request_id, [], FinishReason.ERROR, failure=_failure(error)))

    def start_samples(self, sequence: Sequence) -> None:
        """Queue the samples that wait for the prompt of *sequence*. Call before its first token is added."""
        request = self._open[sequence.connection, sequence.request_id]
        samples = [self._sample(sequence, index) for index in request.unstarted]
        for sample in samples:
            # What the cache spared the request has been counted, and is told with sample 0.
            sample.num_cached_tokens = 0
        request.live.update((sample.index, sample) for sample in samples)
        request.unstarted.clear()
        self._scheduler.add_samples(sequence, samples)

    def answer(self, sequence: Sequence, logprob: TokenLogprob | None, reason: FinishReason | None, now: float) -> None:
        """Say the newest token of *sequence*, which ends with it where there is a *reason*."""
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
        self.outbox.say(sequence.connection, delta)
        if reason is not None:
            self._end(sequence, reason)

    def abort(self, connection: int, request_id: str, index: int | None = None) -> None:
        """End a request, or its sample *index*, before any more work is done for it; an unknown one is no error."""
        request = self._open.get((connection, request_id))
        if request is None:
            return
        for other in [other for other in request.unstarted if index in (None, other)]:
            request.unstarted.remove(other)
            self.outbox.say(connection, TokenDelta(request_id, [], FinishReason.ABORT, index=other))
        for sequence in [live for live in request.live.values() if index in (None, live.index)]:
            times = sequence.clock.times(time.perf_counter())
            delta = TokenDelta(request_id, [], FinishReason.ABORT, index=sequence.index, times=times)
            self.outbox.say(connection, delta)
            self._end(sequence, FinishReason.ABORT)

    def hangup(self, connection: int) -> None:
        """End all requests of a connection that is gone; nothing more is said to it."""
        for owner, request_id in [key for key in self._open if key[0] == connection]:
            self.abort(owner, request_id)
        self.outbox.forget(connection)

    def fail(self, sequence: Sequence, error: SaccadeError) -> list[Sequence]:
        """End the whole request of *sequence*, telling it once, and return its samples; none where it has ended."""
        request = self._open.get((sequence.connection, sequence.request_id))
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
        self.outbox.say(sequence.connection, delta)
        ended = list(request.live.values())
        for sample in ended:
            self._end(sample, FinishReason.ERROR)
        return ended

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        request = self._open[sequence.connection, sequence.request_id]
        sequence.finish_reason = reason
        del request.live[sequence.index]
        if request.unstarted:
            # It ends before its first token, on which the others wait: the next one goes ahead in its place.
            following = self._sample(sequence, request.unstarted.pop(0))
            request.live[following.index] = following
            self._scheduler.encodings.hold(following)
            self._scheduler.add_samples(sequence, [following])
        self._scheduler.remove(sequence)
        if not request.live:
            for source in sequence.sources:
                source.release_slot(self.outbox.released(sequence.connection))
            del self._open[sequence.connection, sequence.request_id]
            self._on_end(sequence.connection, sequence.request_id)

    @staticmethod
    def _sample(sequence: Sequence, index: int) -> Sequence:
        return sequence.sample(index, sequence.arrival + index - sequence.index)


def _failure(error: SaccadeError) -> Failure:
    return Failure(error.code, error.message, error.param)
