"""The whole machine in one place: schedule, run, postprocess; requests in, one frame per connection and step out."""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import structlog

from saccade.engine.admission import Admission
from saccade.engine.cache_feed import CacheFeed
from saccade.engine.pixel_desk import PixelDesk, PixelsByKey
from saccade.engine.requests import Requests
from saccade.engine.runner import ModelRunner, StepOutput
from saccade.engine.scheduler import Schedule, Scheduler
from saccade.engine.sequence import Sequence
from saccade.errors import InternalError, SaccadeError
from saccade.protocol.description import Description
from saccade.protocol.load import STEP_TOKEN_BOUNDS, Load
from saccade.protocol.output import FinishReason, StepFrame
from saccade.protocol.request import EngineRequest, Pixels

PATIENCE_SECONDS = 0.005
"""How long an idle engine waits for a picture before it looks for messages again."""

logger = structlog.get_logger(__name__)


class Engine:
    """Requests in, frames out. A request is known by (connection, request_id)."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        admission: Admission,
        description: Description,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.admission = admission
        self.description = description
        self._paged_blocks = scheduler.block_manager.paged_blocks
        self.feed = CacheFeed(self._paged_blocks, runner.encoder_cache)
        self._requests = Requests(scheduler, runner.sampler.allowed.forget)
        self._outbox = self._requests.outbox
        self._pixel_desk = PixelDesk(scheduler, self._outbox)
        self._num_arrived = self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_step_tokens = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to compute or to tell."""
        return self.scheduler.has_work or bool(self._outbox) or self._pixel_desk.overdue

    def submit(self, connection: int, request: EngineRequest) -> None:
        """Queue a request; what is wrong with it becomes its only delta."""
        slots = [item.slot.name for item in request.media if item.slot is not None]
        if (connection, request.request_id) in self._requests:
            logger.warning("dropped a second request of this id", request_id=request.request_id, connection=connection)
            self._outbox.released(connection).extend(slots)
            return
        self._num_arrived += 1
        try:
            self.scheduler.check_queue()
            sequence = self.admission.admit(connection, request, self._num_arrived)
        except SaccadeError as error:
            self._outbox.released(connection).extend(slots)
            self.refuse(connection, request.request_id, error)
            return
        sequence.clock.arrived = time.perf_counter()
        self._num_arrived += request.num_samples - 1
        self._num_prompt_tokens += sequence.num_prompt_tokens
        self._requests.open(sequence, request.num_samples)

    def supply(self, connection: int, answer: Pixels) -> None:
        """Take pixels that were asked for; the slots of a request that has ended meanwhile go back."""
        samples = self._requests.samples(connection, answer.request_id)
        self._pixel_desk.take(connection, answer, samples, self._requests.fail)

    def refuse(self, connection: int, request_id: str, error: SaccadeError) -> None:
        """Answer a request that never became a sequence."""
        self._requests.refuse(connection, request_id, error)

    def abort(self, connection: int, request_id: str, index: int | None = None) -> None:
        """End a request, or its sample *index*, before any more work is done for it; an unknown one is no error."""
        self._requests.abort(connection, request_id, index)

    def reset_caches(self, *, prefix: bool, media: bool) -> None:
        """Forget what no request uses: KV blocks, encodings. Those who watch the caches are told."""
        if prefix:
            self._paged_blocks.clear()
        if media:
            self.runner.encoder_cache.clear()

    def hangup(self, connection: int) -> None:
        """End all requests of a connection that is gone; nothing more is said to it."""
        self._requests.hangup(connection)

    def step(self) -> dict[int, StepFrame]:
        """Do one step of work and return what it has to say, by connection."""
        self._num_steps += 1
        began = time.perf_counter()
        with self._timed("schedule_seconds"):
            self._take_encodings()
            schedule = self.scheduler.schedule()
            for sequence in schedule.chunks:
                if sequence.clock.scheduled is None:
                    sequence.clock.scheduled = began
        with self._timed("batch_seconds"):
            pixels = self._pixel_desk.serve(schedule, lambda owner, error: self._fail(owner, error, schedule))
        output = self._run(schedule, pixels)
        with self._timed("postprocess_seconds"):
            self._postprocess(schedule, output)
            return self._outbox.take()

    def load(self) -> Load:
        """Return a snapshot of counters."""
        return Load(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.scheduler.parked),
            num_blocks=self._paged_blocks.num_blocks,
            num_free_blocks=self._paged_blocks.num_free_blocks,
            steps_total=self._num_steps,
            step_tokens_total=self._num_step_tokens,
            steps_by_tokens=tuple(self._steps_by_tokens),
            prompt_tokens_total=self._num_prompt_tokens,
            cached_tokens_total=self.scheduler.num_cached_tokens,
            generated_tokens_total=self._num_generated_tokens,
            encoded_items_total=self.runner.num_encoded_items,
            encoded_patches_total=self.runner.num_encoded_patches,
            encoder_cache_hits_total=self.scheduler.encodings.num_hits,
            encoder_cache_bytes=self.runner.encoder_cache.used_bytes,
            preemptions_total=self.scheduler.num_preemptions,
            evicted_blocks_total=self._paged_blocks.num_evicted,
            **{f"{name}_total": seconds for name, seconds in asdict(self.runner.timings).items()},
        )

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        timings = self.runner.timings
        setattr(timings, name, getattr(timings, name) + time.perf_counter() - began)

    def _fail(self, sequence: Sequence, error: SaccadeError | None, schedule: Schedule) -> None:
        for ended in self._requests.fail(sequence, error or InternalError("The request failed.")):
            schedule.chunks.pop(ended, None)

    def _take_encodings(self, patience_seconds: float = 0.0) -> None:
        """Keep what was encoded aside, where it is done; where that failed, so do those who wait for it."""
        lane = self.runner.lane
        if (job := lane.take(patience_seconds)) is not None:
            waiting = [sequence for sequence in self.scheduler.running if sequence.needs(job.keys)]
            try:
                encoded = job.outcome.result()
                self.runner.keep(encoded)
                for sequence in waiting:
                    sequence.clock.encode_seconds += encoded.seconds
            except Exception:
                logger.exception("encoding failed", request_ids=sorted({sequence.request_id for sequence in waiting}))
                self.runner.check_device()
                for sequence in waiting:
                    self._requests.fail(sequence, InternalError("The model failed on a picture of this request."))
        self.scheduler.encodings.in_flight = lane.in_flight

    def _run(self, schedule: Schedule, pixels: PixelsByKey) -> StepOutput:
        aside = {key: pixels.pop(key) for key in schedule.aside & pixels.keys()}
        if aside:
            self.runner.lane.begin(aside)
        if not schedule.chunks:
            # Nobody has anything to do before a picture is encoded.
            self._take_encodings(PATIENCE_SECONDS)
            return StepOutput()
        try:
            return self.runner.run(schedule.chunks, pixels)
        except Exception:
            logger.exception("a step failed", request_ids=sorted({sequence.request_id for sequence in schedule.chunks}))
            self.runner.check_device()
            for sequence in list(schedule.chunks):
                self._fail(sequence, InternalError("The model failed on this request's step."), schedule)
            return StepOutput()

    def _postprocess(self, schedule: Schedule, output: StepOutput) -> None:
        now = time.perf_counter()
        inline = [claims for key, claims in schedule.encode.items() if key not in schedule.aside]
        for sequence in {sequence for claims in inline for sequence, _ in claims}:
            sequence.clock.encode_seconds += output.encode_seconds
        for sequence, logprobs in output.prompt_logprobs:
            sequence.prompt_logprobs = (sequence.prompt_logprobs or []) + logprobs
        for sequence, _, _ in output.sampled:
            if sequence.num_generated_tokens == 0:
                sequence.clock.first_token = now
                # Before the commit, which lets go of the encodings that the request's other samples need as well.
                self._requests.start_samples(sequence)
        if num_tokens := sum(schedule.chunks.values()):
            self._num_step_tokens += num_tokens
            self._steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self.scheduler.commit(schedule)
        self._num_generated_tokens += len(output.sampled)
        for sequence, token_id, logprob in output.sampled:
            sequence.token_ids.append(token_id)
            self._requests.answer(sequence, logprob, self._finish_reason(sequence, token_id), now)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if token_id in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        full = sequence.num_tokens >= self.admission.max_model_len
        return FinishReason.LENGTH if full or sequence.num_generated_tokens >= sequence.sampling.max_tokens else None
