"""The engine: schedule, execute and commit each step. Requests go in, and a frame per connection comes out."""

import time

import structlog

from saccade.engine.core.cache_events import CacheFeed
from saccade.engine.core.counters import Counters
from saccade.engine.core.encoder_results import EncoderResults
from saccade.engine.core.grammars import Grammars, NoGrammars
from saccade.engine.core.kv_connector import KvConnector, NoKvConnector
from saccade.engine.core.kv_receiver import KvReceiver
from saccade.engine.core.kv_sender import KvSender
from saccade.engine.core.masks import masks_of
from saccade.engine.core.pixel_requests import PixelRequests
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.requests import Requests
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import StepOutput
from saccade.engine.core.step_builder import PlannedStep, StepBuilder
from saccade.engine.executor.protocol import Executor
from saccade.engine.recording import Recorder
from saccade.errors import InternalError, SaccadeError, cause
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.kv_transfer import KvForm
from saccade.protocol.output import StepFrame
from saccade.protocol.request import EngineRequest, SupplyPixels
from saccade.transport.kv_transfer.service import KvTransfers

WAIT_SECONDS = 0.005
"""How long an idle engine waits for an image or a grammar before it checks for messages again."""

logger = structlog.get_logger(__name__)


class Engine:
    """Requests in, frames out; (connection, request_id) identifies a request. *recorder* is *executor*, or None.

    With *transfers* the engine takes part in requests that two workers serve, in the role of its description; *kv_form*
    is the form of the state that they move. Without *grammars*, requests with a grammar are refused. *cause* is the
    failure of the last step that failed.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        validator: RequestValidator,
        description: Description,
        recorder: Recorder | None = None,
        grammars: Grammars | None = None,
        transfers: KvTransfers | None = None,
        kv_form: KvForm | None = None,
    ) -> None:
        self.executor = executor
        self.grammars = grammars or NoGrammars()
        self.recorder = recorder
        self.scheduler = scheduler
        self.validator = validator
        self.description = description
        self.cause = ""
        self._counters = Counters()
        self._encoder_cache = scheduler.encoder_scheduler.encoder_cache
        manager = scheduler.block_manager
        self.feed = CacheFeed(manager.paged_blocks, self._encoder_cache, manager.checkpoints)
        self._requests = Requests(scheduler, validator.max_model_len)
        self._encoder_results = EncoderResults(scheduler, self._requests, self._counters)
        self._frames = self._requests.frames
        self._pixel_requests = PixelRequests(scheduler, self._frames)
        self.kv_connector = self._kv_connector(transfers, kv_form)
        # Not functions of the engine: in a cycle with itself, it would keep its caches until garbage is collected.
        self._requests.on_end, self._requests.keeps = self.kv_connector.on_end, self.kv_connector.keep
        self._steps = StepBuilder(scheduler.rows, self._encoder_cache, manager.checkpoints)
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` has work or output."""
        has_news = bool(self._frames) or self._encoder_cache.has_dropped
        is_urgent = self._pixel_requests.overdue or self.grammars.is_busy
        return self.scheduler.has_work or has_news or is_urgent or self.kv_connector.has_work

    def submit(self, connection: int, request: EngineRequest) -> None:
        """Queue a request; if it is invalid, its only delta is the error."""
        slots = [item.slot.name for item in request.media if item.slot is not None]
        if (connection, request.request_id) in self._requests:
            logger.warning(
                "dropped a request with a duplicate id", request_id=request.request_id, connection=connection
            )
            self._frames.released_slots(connection).extend(slots)
            return
        self._num_arrived += 1
        try:
            self.scheduler.check_queue()
            self.kv_connector.check(request)
            sequence = self.validator.validated(connection, request, self._num_arrived)
            if sequence.grammar is not None:
                self.grammars.begin(sequence, sequence.grammar)
        except SaccadeError as error:
            self._frames.released_slots(connection).extend(slots)
            self.refuse(connection, request.request_id, error)
            return
        sequence.clock.arrived = time.perf_counter()
        self._num_arrived += request.num_samples - 1
        if not sequence.awaits_kv:  # else the prefill worker counts them
            self._counters.prompt_tokens_total += sequence.num_prompt_tokens
        self._requests.open(sequence, request.num_samples)
        self.kv_connector.open(sequence)

    def supply(self, connection: int, answer: SupplyPixels) -> None:
        """Accept the pixels that were requested from a gateway. If the request has ended, its slots are released."""
        samples = self._requests.samples(connection, answer.request_id)
        self._pixel_requests.take(connection, answer, samples, self._requests.fail)

    def refuse(self, connection: int, request_id: str, error: SaccadeError) -> None:
        """Send an error for a request that never became a sequence."""
        self._requests.refuse(connection, request_id, error)

    def abort(self, connection: int, request_id: str, index: int | None = None) -> None:
        """End a request, or its sample *index*, without further work. An unknown request is ignored."""
        self._requests.abort(connection, request_id, index)

    def reset_caches(self, *, prefix: bool, media: bool) -> None:
        """Drop KV blocks and encoder outputs that no request uses; watchers of the caches are notified."""
        if prefix:
            self.scheduler.block_manager.clear()
        if media:
            self._encoder_cache.clear()

    def hangup(self, connection: int) -> None:
        """End all requests of a closed connection, and discard its output."""
        self._requests.hangup(connection)

    def step(self) -> dict[int, StepFrame]:
        """Run one step and return its output, by connection."""
        self._counters.steps_total += 1
        began = time.perf_counter()
        with self._counters.timed("schedule_seconds_total"):
            self._settle()
            schedule = self.scheduler.schedule()
            self.kv_connector.plan(schedule)
            for sequence in schedule.chunks:
                if sequence.clock.scheduled is None:
                    sequence.clock.scheduled = began
        with self._counters.timed("batch_seconds_total"):
            plan = self._plan(schedule)
        output = self._execute(schedule, plan)
        with self._counters.timed("postprocess_seconds_total"):
            self._requests.commit(schedule, plan, output, self._counters)
            self.kv_connector.on_executed(output.sent)
            return self._frames.take()

    def close(self) -> None:
        """End transfers, wait until the recording is written, and end the executor."""
        self.kv_connector.close()
        self.grammars.close()
        self.executor.close()

    def load(self) -> Load:
        """Return a snapshot of the counters."""
        return self._counters.load(self.scheduler)

    def _kv_connector(self, transfers: KvTransfers | None, form: KvForm | None) -> KvConnector:
        if transfers is None or form is None:
            return NoKvConnector()
        if self.description.role == "prefill":
            return KvSender(transfers, form, self.scheduler, self._requests)
        return KvReceiver(transfers, form, self.scheduler, self._requests)

    def _settle(self) -> None:
        """Take what has happened since the last step: encoded images, transfers, a recording that is due, grammars."""
        self._take_jobs(0.0)
        self.kv_connector.poll()
        if self.recorder is not None:
            self._begin_segment_if_due(self.recorder)
        timeout_seconds = 0.0 if self.scheduler.has_work else WAIT_SECONDS
        for ready in self.grammars.take(self._requests.samples, timeout_seconds):
            for sequence in self._requests.samples(ready.connection, ready.request_id):
                if ready.error is not None:
                    self._requests.fail(sequence, ready.error)
                elif sequence in self.scheduler.parked:
                    self.scheduler.resume(sequence)

    def _begin_segment_if_due(self, recorder: Recorder) -> None:
        """Start a recording with empty rows and caches; the running sequences are computed again.

        Background jobs end first. Until then, no further job begins.
        """
        encoder_scheduler = self.scheduler.encoder_scheduler
        encoder_scheduler.begins_no_jobs = recorder.is_due and self.scheduler.can_start_over
        if encoder_scheduler.begins_no_jobs and not encoder_scheduler.jobs and recorder.begin():
            self.scheduler.start_over()
            self.reset_caches(prefix=True, media=True)

    def _take_jobs(self, timeout_seconds: float) -> None:
        if self._encoder_results.take_jobs(self.executor.finished_jobs(timeout_seconds)):
            self.executor.check_device()

    def _plan(self, schedule: Schedule) -> PlannedStep:
        """Return the step as a value, after what cannot be computed is removed from *schedule*."""

        def fail(sequence: Sequence, error: SaccadeError) -> None:
            for sample in self._requests.fail(sequence, error):
                schedule.chunks.pop(sample, None)

        pixels = self._pixel_requests.serve(schedule, fail)
        masks, errors = masks_of(schedule, self.validator.spec.vocab_size)
        for sequence, error in errors.items():
            fail(sequence, error)
        unread = schedule.encode.keys() - pixels
        self._encoder_results.abandon(unread)
        for key in unread:
            del schedule.encode[key]
        schedule.background -= unread
        plan = self._steps.build(schedule, pixels, masks)
        for job in plan.step.jobs:
            if job.background:
                self.scheduler.encoder_scheduler.jobs[job.job_id] = frozenset(schedule.background)
        return plan

    def _execute(self, schedule: Schedule, plan: PlannedStep) -> StepOutput:
        """Execute the step. If it fails, its requests fail and the output is empty."""
        try:
            output = self.executor.execute(plan.step, plan.sampling)
        except Exception as error:
            self.cause = cause(error)
            logger.exception("a step failed", request_ids=sorted({sequence.request_id for sequence in schedule.chunks}))
            self.executor.check_device()
            for sequence in (*schedule.chunks, *self.kv_connector.take_planned()):
                self._requests.fail(sequence, InternalError("The model failed on this request's step."))
            self._encoder_results.abandon(schedule.encoded_within)
            return StepOutput(plan.step.number)
        if self._encoder_results.take_step(schedule, output):
            self.executor.check_device()
        self._counters.batch_seconds_total += output.batch_seconds
        self._counters.network_seconds_total += output.network_seconds
        if not schedule.chunks:
            # Without chunks, the step only waits for an image to be encoded.
            self._take_jobs(WAIT_SECONDS)
        return output
