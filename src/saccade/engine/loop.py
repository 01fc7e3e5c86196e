"""The engine: schedule, execute and postprocess each step. Requests go in, and a frame per connection comes out."""

import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import structlog

from saccade.engine.core.cache_events import CacheFeed
from saccade.engine.core.grammars import Grammars
from saccade.engine.core.images import EncoderKey
from saccade.engine.core.kv_connector import KvConnector, NoKvConnector
from saccade.engine.core.kv_receiver import KvReceiver
from saccade.engine.core.kv_sender import KvSender
from saccade.engine.core.pixel_requests import PixelRequests, PixelsByKey
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.requests import Requests
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import JobDone, StepOutput
from saccade.engine.core.step_builder import PlannedStep, StepBuilder
from saccade.engine.core.thinking_budget import must_end_reasoning, only
from saccade.engine.executor.protocol import Executor
from saccade.engine.recording import Recorder
from saccade.errors import InternalError, InvalidValue, SaccadeError, UnsupportedParameter, cause
from saccade.protocol.description import Description
from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Load
from saccade.protocol.kv_transfer import KvForm
from saccade.protocol.output import FinishReason, StepFrame
from saccade.protocol.request import EngineRequest, SupplyPixels
from saccade.transport.kv_transfer.service import KvTransfers

WAIT_SECONDS = 0.005
"""How long an idle engine waits for an image or a grammar before it checks for messages again."""

logger = structlog.get_logger(__name__)


@dataclass(slots=True)
class Timings:
    """Sums of wall-clock seconds since the start. Encoding within a step is also part of the network's time."""

    schedule_seconds: float = 0.0
    batch_seconds: float = 0.0
    encode_seconds: float = 0.0
    network_seconds: float = 0.0
    postprocess_seconds: float = 0.0


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
        self.grammars = grammars
        self.recorder = recorder
        self.scheduler = scheduler
        self.validator = validator
        self.description = description
        self.timings = Timings()
        self.cause = ""
        self._paged_blocks = scheduler.block_manager.paged_blocks
        self._encoder_cache = scheduler.encoder_scheduler.encoder_cache
        self.feed = CacheFeed(self._paged_blocks, self._encoder_cache, scheduler.block_manager.checkpoints)
        self._requests = Requests(scheduler)
        self._frames = self._requests.frames
        self._pixel_requests = PixelRequests(scheduler, self._frames)
        self.kv_connector = self._kv_connector(transfers, kv_form)
        # Not a function of the engine: in a cycle with itself, it would keep its caches until garbage is collected.
        self._requests.on_end = self.kv_connector.on_end
        self._steps = StepBuilder(scheduler.rows, self._encoder_cache, scheduler.block_manager.checkpoints)
        self._num_arrived = self._num_steps = self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_step_tokens = self._num_encoded_items = self._num_encoded_patches = 0
        self._steps_by_tokens = [0] * (len(STEP_TOKEN_BOUNDS) + 1)

    @property
    def has_work(self) -> bool:
        """Whether `step` has work or output."""
        has_news = bool(self._frames) or self._encoder_cache.has_dropped
        is_compiling = self.grammars is not None and self.grammars.is_busy
        is_urgent = self._pixel_requests.overdue or is_compiling
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
            self._begin_grammar(sequence)
        except SaccadeError as error:
            self._frames.released_slots(connection).extend(slots)
            self.refuse(connection, request.request_id, error)
            return
        sequence.clock.arrived = time.perf_counter()
        self._num_arrived += request.num_samples - 1
        if not sequence.awaits_kv:  # else the prefill worker counts them
            self._num_prompt_tokens += sequence.num_prompt_tokens
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
        self._num_steps += 1
        began = time.perf_counter()
        with self._timed("schedule_seconds"):
            self._take_finished_jobs()
            self.kv_connector.poll()
            if self.recorder is not None:
                self._begin_segment_if_due(self.recorder)
            self._take_grammars()
            schedule = self.scheduler.schedule()
            self.kv_connector.plan(schedule)
            for sequence in schedule.chunks:
                if sequence.clock.scheduled is None:
                    sequence.clock.scheduled = began
        with self._timed("batch_seconds"):
            pixels = self._pixel_requests.serve(schedule, lambda owner, error: self._fail(owner, error, schedule))
            plan = self._plan(schedule, pixels, self._masks(schedule))
        output = self._execute(schedule, plan)
        with self._timed("postprocess_seconds"):
            self._postprocess(schedule, plan, output)
            return self._frames.take()

    def close(self) -> None:
        """End transfers, wait until the recording is written, and end the executor."""
        self.kv_connector.close()
        if self.grammars is not None:
            self.grammars.close()
        self.executor.close()

    def load(self) -> Load:
        """Return a snapshot of the counters."""
        return Load(
            num_running=self.scheduler.num_admitted,
            num_waiting=len(self.scheduler.waiting) + len(self.scheduler.parked),
            num_blocks=self._paged_blocks.num_blocks,
            num_free_blocks=self._paged_blocks.num_free_blocks,
            steps_total=self._num_steps,
            step_tokens_total=self._num_step_tokens,
            steps_by_tokens=tuple(self._steps_by_tokens),
            prompt_tokens_total=self._num_prompt_tokens,
            cached_tokens_total=self.scheduler.num_cached_tokens,
            generated_tokens_total=self._num_generated_tokens,
            encoded_items_total=self._num_encoded_items,
            encoded_patches_total=self._num_encoded_patches,
            encoder_cache_hits_total=self.scheduler.encoder_scheduler.num_hits,
            encoder_cache_bytes=self._encoder_cache.used_bytes,
            preemptions_total=self.scheduler.num_preemptions,
            evicted_blocks_total=self._paged_blocks.num_evicted,
            **{f"{name}_total": seconds for name, seconds in asdict(self.timings).items()},
        )

    def _kv_connector(self, transfers: KvTransfers | None, form: KvForm | None) -> KvConnector:
        if transfers is None or form is None:
            return NoKvConnector()
        if self.description.role == "prefill":
            return KvSender(transfers, form, self.scheduler, self._requests)
        return KvReceiver(transfers, form, self.scheduler, self._requests, self._finish_reason)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        setattr(self.timings, name, getattr(self.timings, name) + time.perf_counter() - began)

    def _begin_grammar(self, sequence: Sequence) -> None:
        """Compile the grammar of a request that has one. Raises UnsupportedParameter without *grammars*."""
        if sequence.grammar is None:
            return
        if self.grammars is None:
            raise UnsupportedParameter(
                "This worker cannot constrain answers by a grammar; leave `grammar` out.", "grammar"
            )
        self.grammars.begin(sequence, sequence.grammar)

    def _take_grammars(self) -> None:
        """Queue the requests whose grammars are compiled, and fail those whose grammars are wrong."""
        if self.grammars is None:
            return
        timeout_seconds = 0.0 if self.scheduler.has_work else WAIT_SECONDS
        for ready in self.grammars.take(self._requests.samples, timeout_seconds):
            for sequence in self._requests.samples(ready.connection, ready.request_id):
                if ready.error is not None:
                    self._requests.fail(sequence, ready.error)
                elif sequence in self.scheduler.parked:
                    self.scheduler.resume(sequence)

    def _masks(self, schedule: Schedule) -> dict[Sequence, bytes]:
        """Return the masks of sequences that draw in this step, from grammars or to end the reasoning.

        A request that no token can continue fails.
        """
        masks = {}
        for sequence, num_tokens in list(schedule.chunks.items()):
            draws = sequence.num_computed_tokens + num_tokens == sequence.num_tokens
            if not draws or sequence not in schedule.chunks:
                continue
            budget = sequence.sampling.thinking_budget
            if budget is not None and must_end_reasoning(sequence):
                masks[sequence] = only(budget.end_id, self.validator.spec.vocab_size)
                continue
            if sequence.matcher is None:
                continue
            try:
                masks[sequence] = sequence.matcher.mask()
            except InvalidValue as error:
                self._fail(sequence, error.at("grammar"), schedule)
        return masks

    def _fail(self, sequence: Sequence, error: SaccadeError | None, schedule: Schedule) -> None:
        for sample in self._requests.fail(sequence, error or InternalError("The request failed.")):
            schedule.chunks.pop(sample, None)

    def _begin_segment_if_due(self, recorder: Recorder) -> None:
        """Start a recording with empty rows and caches; the running sequences are computed again.

        Background jobs end first. Until then, no further job begins.
        """
        encoder_scheduler = self.scheduler.encoder_scheduler
        encoder_scheduler.begins_no_jobs = recorder.is_due and self.scheduler.can_start_over
        if encoder_scheduler.begins_no_jobs and not encoder_scheduler.jobs and recorder.begin():
            self.scheduler.start_over()
            self.reset_caches(prefix=True, media=True)

    def _take_finished_jobs(self, timeout_seconds: float = 0.0) -> None:
        """Use the images that were encoded in the background. If a job failed, fail the requests that need it."""
        for job in self.executor.finished_jobs(timeout_seconds):
            self._take_job(job)

    def _take_job(self, job: JobDone) -> None:
        keys = self.scheduler.encoder_scheduler.jobs.pop(job.job_id)
        if job.failed:
            self._fail_images(keys)
            return
        waiting = [sequence for sequence in self.scheduler.running if sequence.needs(keys)]
        self._note_encoded(keys, job.seconds)
        for sequence in waiting:
            sequence.clock.encode_seconds += job.seconds

    def _fail_images(self, keys: Collection[EncoderKey]) -> list[Sequence]:
        """Fail the requests that need images that could not be encoded; return their sequences."""
        waiting = [sequence for sequence in self.scheduler.running if sequence.needs(keys)]
        logger.error("encoding failed", request_ids=sorted({sequence.request_id for sequence in waiting}))
        self.executor.check_device()
        for key in keys:
            self._encoder_cache.abandon(key)
        error = InternalError("The model failed on an image of this request.")
        return [sample for sequence in waiting for sample in self._requests.fail(sequence, error)]

    def _note_encoded(self, keys: Iterable[EncoderKey], seconds: float) -> None:
        for key in keys:
            self._encoder_cache.complete(key)
            self._num_encoded_items += 1
            self._num_encoded_patches += self.scheduler.encoder_scheduler.costs.patches(key.grid)
        self.timings.encode_seconds += seconds

    def _plan(self, schedule: Schedule, pixels: PixelsByKey, masks: Mapping[Sequence, bytes]) -> PlannedStep:
        """Return the step as a value, which no longer changes."""
        for key in [key for key in schedule.encode if key not in pixels]:
            self._encoder_cache.abandon(key)
            del schedule.encode[key]
            schedule.background.discard(key)
        plan = self._steps.build(schedule, pixels, masks)
        for job in plan.step.jobs:
            if job.background:
                self.scheduler.encoder_scheduler.jobs[job.job_id] = frozenset(schedule.background)
        return plan

    def _execute(self, schedule: Schedule, plan: PlannedStep) -> StepOutput:
        """Execute the step. If it fails, its requests fail and the output is empty."""
        within = [key for key in schedule.encode if key not in schedule.background]
        try:
            output = self.executor.execute(plan.step, plan.sampling)
        except Exception as error:
            self.cause = cause(error)
            logger.exception("a step failed", request_ids=sorted({sequence.request_id for sequence in schedule.chunks}))
            self.executor.check_device()
            for sequence in (*schedule.chunks, *self.kv_connector.take_planned()):
                self._fail(sequence, InternalError("The model failed on this request's step."), schedule)
            for key in within:
                self._encoder_cache.abandon(key)
            return StepOutput(plan.step.number)
        failed = {key for key in within if self._encoder_cache.output_id(key) in output.failed_encodings}
        self._note_encoded([key for key in within if key not in failed], output.encode_seconds)
        for sequence in self._fail_images(failed) if failed else ():
            schedule.chunks.pop(sequence, None)
        self.timings.batch_seconds += output.batch_seconds
        self.timings.network_seconds += output.network_seconds
        if not schedule.chunks:
            # Without chunks, the step only waits for an image to be encoded.
            self._take_finished_jobs(WAIT_SECONDS)
        return output

    def _postprocess(self, schedule: Schedule, plan: PlannedStep, output: StepOutput) -> None:
        now = time.perf_counter()
        within = [claims for key, claims in schedule.encode.items() if key not in schedule.background]
        for sequence in {sequence for claims in within for sequence, _ in claims}:
            sequence.clock.encode_seconds += output.encode_seconds
        for sequence, logprobs in zip(plan.prompts, output.prompt_logprobs, strict=bool(output.prompt_logprobs)):
            sequence.prompt_logprobs = (sequence.prompt_logprobs or []) + logprobs
        logprobs_of = output.logprobs or [None] * len(output.token_ids)
        results = zip(plan.drawing, output.token_ids, logprobs_of, strict=bool(output.token_ids))
        draws = [result for result in results if result[0] in schedule.chunks]
        for sequence, _, _ in draws:
            if sequence.num_generated_tokens == 0:
                sequence.clock.first_token = now
                # Before the commit, which unpins the encoder outputs that the request's other samples also need.
                self._requests.start_samples(sequence)
        if num_tokens := sum(schedule.chunks.values()):
            self._num_step_tokens += num_tokens
            self._steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1
        self.scheduler.commit(schedule)
        self._num_generated_tokens += len(draws)
        for sequence, token_id, logprob in draws:
            sequence.token_ids.append(token_id)
            reason = self._finish_reason(sequence, token_id)
            if not self.kv_connector.keep(sequence, logprob, reason, now):
                self._requests.answer(sequence, logprob, reason, now)
        self.kv_connector.on_executed(output.sent)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if sequence.matcher is not None:
            sequence.matcher.take(token_id)
            if sequence.matcher.is_finished:
                return FinishReason.STOP
        if token_id in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        full = sequence.num_tokens >= self.validator.max_model_len
        return FinishReason.LENGTH if full or sequence.num_generated_tokens >= sequence.sampling.max_tokens else None
