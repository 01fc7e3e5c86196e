"""The whole machine in one place: schedule, run, postprocess; requests in, one frame per connection and step out."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from saccade.engine.admission import Admission
from saccade.engine.block_manager import PagedBlocks
from saccade.engine.encoder_cache import EncoderKey
from saccade.engine.outbox import Outbox
from saccade.engine.runner import ModelRunner
from saccade.engine.scheduler import Schedule, Scheduler
from saccade.engine.sequence import Sequence
from saccade.errors import InternalError, SaccadeError
from saccade.protocol.description import Description
from saccade.protocol.load import Load
from saccade.protocol.output import Failure, FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import EngineRequest

logger = logging.getLogger(__name__)


class Engine:
    """Requests in, frames out. A request is known by (connection, request_id)."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        admission: Admission,
        paged_blocks: PagedBlocks,
        description: Description,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.admission = admission
        self.description = description
        self._paged_blocks = paged_blocks
        self._sequences: dict[tuple[int, str], Sequence] = {}
        self._outbox = Outbox()
        self._num_arrived = self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to tell."""
        return self.scheduler.has_work or bool(self._outbox)

    def submit(self, connection: int, request: EngineRequest) -> None:
        """Queue a request; what is wrong with it becomes its only delta."""
        if (connection, request.request_id) in self._sequences:
            logger.warning("dropped a second request with the id %s on connection %d", request.request_id, connection)
            return
        self._num_arrived += 1
        try:
            sequence = self.admission.admit(connection, request, self._num_arrived)
        except SaccadeError as error:
            slots = [item.slot.name for item in request.media if item.slot is not None]
            self._outbox.released(connection).extend(slots)
            self.refuse(connection, request.request_id, error)
            return
        self._sequences[connection, request.request_id] = sequence
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self.scheduler.add(sequence)

    def refuse(self, connection: int, request_id: str, error: SaccadeError) -> None:
        """Answer a request that never became a sequence."""
        failure = Failure(error.code, error.message, error.param)
        self._outbox.say(connection, TokenDelta(request_id, [], FinishReason.ERROR, failure=failure))

    def abort(self, connection: int, request_id: str) -> None:
        """End a request before any more work is done for it; an unknown id is no error."""
        sequence = self._sequences.get((connection, request_id))
        if sequence is not None:
            self._end(sequence, FinishReason.ABORT)

    def hangup(self, connection: int) -> None:
        """End all requests of a connection that is gone; nothing more is said to it."""
        for sequence in [sequence for sequence in self._sequences.values() if sequence.connection == connection]:
            self._end(sequence, FinishReason.ABORT)
        self._outbox.forget(connection)

    def step(self) -> dict[int, StepFrame]:
        """Do one step of work and return what it has to say, by connection."""
        self._num_steps += 1
        with self._timed("schedule_seconds"):
            schedule = self.scheduler.schedule()
        with self._timed("batch_seconds"):
            pixels = self._read_pixels(schedule)
        sampled = self._run(schedule, pixels)
        with self._timed("postprocess_seconds"):
            self._postprocess(schedule, sampled)
            return self._outbox.take()

    def load(self) -> Load:
        """Return a snapshot of counters."""
        return Load(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=self._paged_blocks.num_blocks,
            num_free_blocks=self._paged_blocks.num_free_blocks,
            steps_total=self._num_steps,
            prompt_tokens_total=self._num_prompt_tokens,
            cached_tokens_total=self.scheduler.num_cached_tokens,
            generated_tokens_total=self._num_generated_tokens,
            encoded_items_total=self.runner.num_encoded_items,
            encoded_patches_total=self.runner.num_encoded_patches,
            encoder_cache_hits_total=self.scheduler.num_encoder_cache_hits,
            preemptions_total=self.scheduler.num_preemptions,
            **{f"{name}_total": seconds for name, seconds in asdict(self.runner.timings).items()},
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        timings = self.runner.timings
        setattr(timings, name, getattr(timings, name) + time.perf_counter() - began)

    def _read_pixels(self, schedule: Schedule) -> dict[EncoderKey, bytes]:
        """Return the pixels to encode. A picture that nobody can bring ends all who need it, and only those."""
        pixels: dict[EncoderKey, bytes] = {}
        for key, claims in schedule.encode.items():
            failure: SaccadeError | None = None
            for sequence, source in claims:
                try:
                    pixels[key] = source.read(self._outbox.released(sequence.connection))
                    break
                except SaccadeError as error:
                    failure = failure or error
                except Exception:
                    logger.exception("request %s: reading a picture failed", sequence.request_id)
                    failure = failure or InternalError("Reading the picture's pixels failed.", source.param)
            else:
                for sequence in {sequence for sequence, _ in claims}:
                    self._fail(sequence, failure, schedule)
        wanted = {key for key, claims in schedule.encode.items() if any(s in schedule.chunks for s, _ in claims)}
        return {key: content for key, content in pixels.items() if key in wanted}

    def _fail(self, sequence: Sequence, error: SaccadeError | None, schedule: Schedule) -> None:
        if sequence.finish_reason is None:
            error = error or InternalError("The request failed.")
            schedule.chunks.pop(sequence, None)
            self._end(sequence, FinishReason.ERROR, failure=Failure(error.code, error.message, error.param))

    def _run(self, schedule: Schedule, pixels: dict[EncoderKey, bytes]) -> list[tuple[Sequence, int]]:
        if not schedule.chunks:
            return []
        try:
            return self.runner.run(schedule.chunks, pixels)
        except Exception:
            logger.exception("a step with %d sequences failed", len(schedule.chunks))
            self.runner.check_device()
            for sequence in list(schedule.chunks):
                self._fail(sequence, InternalError("The model failed on this request's step."), schedule)
            return []

    def _postprocess(self, schedule: Schedule, sampled: list[tuple[Sequence, int]]) -> None:
        self.scheduler.commit(schedule)
        for sequence, token_id in sampled:
            sequence.token_ids.append(token_id)
            self._num_generated_tokens += 1
            reason = self._finish_reason(sequence, token_id)
            if reason is not None:
                self._end(sequence, reason, [token_id])
            else:
                self._outbox.say(sequence.connection, _delta(sequence, [token_id]))

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        full = sequence.num_tokens >= self.admission.max_model_len
        return FinishReason.LENGTH if full or sequence.num_generated_tokens >= sequence.sampling.max_tokens else None

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        token_ids: list[int] | None = None,
        failure: Failure | None = None,
    ) -> None:
        sequence.finish_reason = reason
        self.scheduler.remove(sequence)
        for source in sequence.sources:
            source.release_slot(self._outbox.released(sequence.connection))
        del self._sequences[sequence.connection, sequence.request_id]
        self._outbox.say(sequence.connection, _delta(sequence, token_ids or [], failure))


def _delta(sequence: Sequence, token_ids: list[int], failure: Failure | None = None) -> TokenDelta:
    first = sequence.num_generated_tokens == len(token_ids) > 0
    num_cached_tokens = sequence.num_cached_tokens or 0 if first else 0
    return TokenDelta(sequence.request_id, token_ids, sequence.finish_reason, num_cached_tokens, failure)
