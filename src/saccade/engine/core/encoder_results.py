"""Take what the vision encoder returns: outputs that sequences wait for, and failures, which end requests. No torch."""

from collections.abc import Collection, Iterable

import structlog

from saccade.engine.core.counters import Counters
from saccade.engine.core.images import EncoderKey
from saccade.engine.core.requests import Requests
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.step import JobDone, StepInput, StepOutput
from saccade.errors import InternalError

logger = structlog.get_logger(__name__)


class EncoderResults:
    """Completes the encoder outputs of *scheduler*; if an image cannot be encoded, the *requests* that need it fail."""

    def __init__(self, scheduler: Scheduler, requests: Requests, counters: Counters) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.encoder_scheduler.encoder_cache
        self._requests = requests
        self._counters = counters

    def begin(self, schedule: Schedule, step: StepInput) -> None:
        """Note the images that a launched step encodes, within it and in the background."""
        self._scheduler.encoder_scheduler.launched.update(schedule.encoded_within)
        for job in step.jobs:
            if job.background:
                self._scheduler.encoder_scheduler.jobs[job.job_id] = frozenset(schedule.background)

    def take_jobs(self, jobs: Iterable[JobDone]) -> bool:
        """Take the images that were encoded in the background. Return whether a job failed."""
        has_failed = False
        for job in jobs:
            keys = self._scheduler.encoder_scheduler.jobs.pop(job.job_id)
            if job.failed:
                has_failed = True
                self._fail(keys)
                continue
            for sequence in [one for one in self._scheduler.running if one.needs(keys)]:
                sequence.clock.encode_seconds += job.seconds
            self._complete(keys, job.seconds)
        return has_failed

    def take_step(self, schedule: Schedule, output: StepOutput) -> bool:
        """Take the images that were encoded within the step. Return whether one failed."""
        within = schedule.encoded_within
        self._scheduler.encoder_scheduler.launched.difference_update(within)
        failed = {key for key in within if self._cache.output_id(key) in output.failed_encodings}
        self._complete([key for key in within if key not in failed], output.encode_seconds)
        for sequence in {sequence for key in within for sequence, _ in schedule.encode[key]}:
            sequence.clock.encode_seconds += output.encode_seconds
        if failed:
            self._fail(failed)
        return bool(failed)

    def abandon(self, keys: Iterable[EncoderKey]) -> None:
        """Forget images that are not encoded after all."""
        for key in keys:
            self._scheduler.encoder_scheduler.launched.discard(key)
            self._cache.abandon(key)

    def _complete(self, keys: Iterable[EncoderKey], seconds: float) -> None:
        for key in keys:
            self._cache.complete(key)
            self._counters.encoded_items_total += 1
            self._counters.encoded_patches_total += self._scheduler.encoder_scheduler.costs.patches(key.grid)
        self._counters.encode_seconds_total += seconds

    def _fail(self, keys: Collection[EncoderKey]) -> None:
        waiting = [sequence for sequence in self._scheduler.running if sequence.needs(keys)]
        logger.error("encoding failed", request_ids=sorted({sequence.request_id for sequence in waiting}))
        self.abandon(keys)
        for sequence in waiting:
            self._requests.fail(sequence, InternalError("The model failed on an image of this request."))
