"""The executor of a single device, in the engine's process."""

import time
from collections import deque
from typing import NamedTuple

import structlog
import torch

from saccade.engine.core.step import JobDone, SamplingInput, StepInput, StepOutput
from saccade.engine.executor.async_encoder import AsyncEncoder
from saccade.engine.executor.model_runner import Forwarded, Launched, ModelRunner, collect

logger = structlog.get_logger(__name__)


class _Sampled(NamedTuple):
    """A step whose sampling was launched."""

    forwarded: Forwarded
    launched: Launched
    seconds: float


class LocalExecutor:
    """An executor.protocol.Executor with one ModelRunner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.device = str(runner.device)
        self.dtype = str(runner.dtype).removeprefix("torch.")
        self.async_encoder = AsyncEncoder(runner.encode, runner.threads.aside)
        self._forwarded: deque[Forwarded] = deque()
        self._sampled: deque[_Sampled] = deque()

    def submit(self, step: StepInput) -> None:
        """Launch the network; on a CPU, run it."""
        # First, because these jobs are reported even where the step fails.
        for job in step.jobs:
            if job.beside:
                self.async_encoder.begin(job)
        self.runner.update(step)
        self._forwarded.append(self.runner.forward(step, beside_pictures=self.async_encoder.is_busy))

    def sample(self, sampling: SamplingInput) -> None:
        """Launch the sampling from the oldest hidden states; on a CPU, run it. Raises ValueError for another step."""
        if sampling.number != self._forwarded[0].step.number:
            raise ValueError(f"step {self._forwarded[0].step.number} is to be sampled next, not {sampling.number}")
        forwarded = self._forwarded.popleft()
        began = time.perf_counter()
        launched = self.runner.draw(forwarded, sampling)
        self._sampled.append(_Sampled(forwarded, launched, time.perf_counter() - began))

    def collect(self) -> StepOutput:
        """Wait for the oldest sampled step."""
        forwarded, launched, seconds = self._sampled.popleft()
        began = time.perf_counter()
        drawn = collect(launched)
        seconds += time.perf_counter() - began
        return StepOutput(
            forwarded.step.number,
            drawn.token_ids,
            drawn.logprobs,
            drawn.prompt_logprobs,
            forwarded.batch_seconds,
            forwarded.encode_seconds,
            forwarded.network_seconds + seconds,
        )

    def execute(self, step: StepInput, sampling: SamplingInput) -> StepOutput:
        self.submit(step)
        self.sample(sampling)
        return self.collect()

    def finished_jobs(self, patience_seconds: float = 0.0) -> list[JobDone]:
        """Store the features that were encoded beside the steps, and return the jobs that ended."""
        finished = self.async_encoder.take(patience_seconds)
        if finished is None:
            return []
        job, outcome = finished
        if (error := outcome.exception()) is not None:
            logger.error("encoding failed", job_id=job.job_id, exc_info=error)
            return [JobDone(job.job_id, 0.0, failed=True)]
        encoded = outcome.result()
        self.runner.encodings.update(encoded.features)
        return [JobDone(job.job_id, encoded.seconds)]

    def check_device(self) -> None:
        """Synchronise with a CUDA device, which raises if it has failed."""
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)
