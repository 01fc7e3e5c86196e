"""The engine's step: settle, schedule, plan, launch, collect and commit.

It takes requests, and returns a frame for each connection.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

import structlog

from saccade.engine.core.cache_events import CacheFeed
from saccade.engine.core.grammars import Grammars
from saccade.engine.core.kv_connector import STEP_FAILED, KvConnector
from saccade.engine.core.request_validation import RequestValidator
from saccade.engine.core.requests import Requests
from saccade.engine.core.results import take_results
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.scheduling import schedule_step
from saccade.engine.core.step_builder import PlannedStep, StepBuilder
from saccade.engine.core.step_costs import Allowance, StepCosts
from saccade.engine.executor.protocol import Executor
from saccade.engine.recording import Recorder
from saccade.errors import InternalError, cause
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.output import StepFrame

WAIT_SECONDS = 0.005
"""How long an idle engine waits for a grammar before it checks for messages again."""

logger = structlog.get_logger(__name__)


class Engine:
    """Runs the steps for *requests*, which come and go between steps.

    *recorder* is the *executor* if it records steps, else None.

    *new_connector* makes the KV connector of a prefill or decode worker's engine. Without *grammars*, requests with a
    grammar are refused. When a step is launched, *steps_ahead* (0 or 1) may still be in flight. *cause* says why the
    last failed step failed.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        validator: RequestValidator,
        description: Description,
        recorder: Recorder | None = None,
        grammars: Grammars | None = None,
        new_connector: Callable[[Scheduler], KvConnector] = lambda _: KvConnector(),
        steps_ahead: int = 0,
    ) -> None:
        self.executor, self.recorder, self.scheduler = executor, recorder, scheduler
        self.validator, self.description, self.cause = validator, description, ""
        self.counters, self._steps_ahead = scheduler.counters, steps_ahead
        self._encoder_cache = scheduler.encoder_scheduler.encoder_cache
        manager = scheduler.block_manager
        states = manager.checkpoints or manager.window_blocks
        self.feed = CacheFeed(manager.paged_blocks, self._encoder_cache, states)
        self.requests = Requests(scheduler, validator, grammars)
        self.kv_connector = scheduler.kv_connector = new_connector(scheduler)
        vocab_size = validator.spec.vocab_size
        self._steps = StepBuilder(scheduler.rows, self._encoder_cache, manager.checkpoints, vocab_size)
        self._launched: deque[tuple[Schedule, PlannedStep, float]] = deque()
        self.clock = time.perf_counter
        self._costs, self._collected_at = StepCosts(), 0.0

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do or output to return."""
        has_work = self.scheduler.has_work or self.requests.has_work or self.kv_connector.has_work
        has_unneeded = self._encoder_cache.has_dropped or self.scheduler.encoder_scheduler.has_unpinned
        return has_work or has_unneeded or bool(self._launched)

    def step(self) -> dict[int, StepFrame]:
        """Run one step and return its output, by connection."""
        self.counters.steps_total += 1
        with self.counters.timed("schedule_seconds_total"):
            self._settle()
        if self._launched and not self.scheduler.can_go_ahead:
            self._collect(0)
        with self.counters.timed("schedule_seconds_total"):
            schedule = schedule_step(self.scheduler, self._allowance())
            copies = self.kv_connector.plan_copies(schedule)
        with self.counters.timed("batch_seconds_total"):
            plan = self._steps.build(schedule, copies)
        self._launch(schedule, plan)
        self._collect(self._steps_ahead if schedule.chunks else 0)
        return self.scheduler.frames.take_frames()

    def load(self) -> Load:
        """Return a snapshot of the counters."""
        return self.scheduler.load()

    def close(self) -> None:
        """End transfers, give up grammars, wait until the recording is written, and close the executor."""
        if self.kv_connector.transfers is not None:
            self.kv_connector.transfers.close()
        if self.requests.grammars is not None:
            self.requests.grammars.close()
        self.executor.close()

    def _settle(self) -> None:
        """Handle everything that has happened since the last step: transfers, a recording that is due, grammars.

        Also expire requests for pixels.
        """
        self.kv_connector.settle()
        if self.recorder is not None:
            self.recorder.begin_if_due(self.scheduler, partial(self._collect, 0))
        self.requests.expire_pixels()
        if (grammars := self.requests.grammars) is not None and grammars.pending:
            grammars.take_compiled(self.scheduler, 0.0 if self.scheduler.has_work else WAIT_SECONDS)

    def _allowance(self) -> Allowance | None:
        """Return how much other work the next step may add to its decodes."""
        block_size = self.scheduler.block_manager.paged_blocks.block_size
        return self._costs.allowance(self.scheduler.budgets.step_seconds, block_size)

    def _launch(self, schedule: Schedule, plan: PlannedStep) -> None:
        self.scheduler.launch(schedule)
        self.requests.settle_pixels(schedule)
        began = self.clock()
        try:
            self.executor.launch(plan.step, plan.sampling)
        except Exception as error:
            self._collect(0)
            self._fail(schedule, error)
        else:
            self._launched.append((schedule, plan, began))

    def _collect(self, num_in_flight: int) -> None:
        """Wait for launched steps, oldest first, until only *num_in_flight* are left, and commit their results."""
        while len(self._launched) > num_in_flight:
            schedule, plan, began = self._launched.popleft()
            try:
                output = self.executor.collect_output()
            except Exception as error:
                self._fail(schedule, error)
                continue
            now = self.clock()
            # A step that was launched ahead begins when the one before it ends.
            seconds = now - max(began, self._collected_at)
            self._costs, self._collected_at = self._costs.after(schedule.work, seconds, output.encode_seconds), now
            if self.scheduler.speculation is not None and schedule.work.only_decodes:
                self.scheduler.speculation.times.add(sum(schedule.chunks.values()), seconds)
            with self.counters.timed("postprocess_seconds_total"):
                if output.failed_encodings:
                    self.executor.check_device()
                take_results(self.scheduler, schedule, plan, output)
                self.kv_connector.executed(output.sent)

    def _fail(self, schedule: Schedule, error: Exception) -> None:
        """Fail the requests of a failed step, and of the steps in flight that were launched after it."""
        self.cause = cause(error)
        logger.error("a step failed", request_ids=sorted({one.request_id for one in schedule.chunks}), exc_info=error)
        self.executor.check_device()
        for step in (schedule, *(later for later, _, _ in self._launched)):
            for sequence in self.scheduler.owners(step):
                self.scheduler.fail(sequence, InternalError(STEP_FAILED))
        self.kv_connector.executed(None)
        self.scheduler.abandon(schedule)
