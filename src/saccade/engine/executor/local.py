"""The executor in the engine's process: a single device, or rank 0 of several."""

import time
from collections import deque
from typing import NamedTuple

import structlog
import torch

from saccade.engine.core.step import JobDone, SamplingInput, StepInput, StepOutput
from saccade.engine.executor.async_encoder import AsyncEncoder
from saccade.engine.executor.model_runner import Forwarded, Launched, ModelRunner, collect
from saccade.engine.executor.ranks.peers import Peers

logger = structlog.get_logger(__name__)


class _Sampled(NamedTuple):
    """A step whose sampling was launched."""

    forwarded: Forwarded
    launched: Launched
    seconds: float


class LocalExecutor:
    """An executor.protocol.Executor with one ModelRunner, and *peers*: the other ranks, each with its own runner."""

    def __init__(self, runner: ModelRunner, peers: Peers | None = None) -> None:
        self.runner = runner
        self.peers = Peers() if peers is None else peers
        self.peers.renew()
        self.device = str(runner.device)
        self.dtype = str(runner.dtype).removeprefix("torch.")
        self.async_encoder = AsyncEncoder(runner.encoder.encode, runner.threads.background)
        self._forwarded: deque[Forwarded] = deque()
        self._sampled: deque[_Sampled] = deque()
        self._num_begun = self._num_ended = 0

    def submit(self, step: StepInput) -> None:
        """Launch the network; on a CPU, run it."""
        self._num_begun += 1
        # First, because these jobs are reported even if the step fails.
        for job in step.jobs:
            if job.background:
                self.async_encoder.begin(job)
        self.peers.submit(step)
        self.runner.update(step)
        self._forwarded.append(self.runner.forward(step, encodes_in_background=self.async_encoder.is_busy))
        self._num_ended += 1

    def sample(self, sampling: SamplingInput) -> None:
        """Launch the sampling from the oldest hidden states; on a CPU, run it. Raises ValueError for another step."""
        if sampling.number != self._forwarded[0].step.number:
            raise ValueError(f"step {self._forwarded[0].step.number} is to be sampled next, not {sampling.number}")
        self._num_begun += 1
        forwarded = self._forwarded.popleft()
        began = time.perf_counter()
        self.peers.sample()
        launched = self.runner.draw(forwarded, sampling)
        self._sampled.append(_Sampled(forwarded, launched, time.perf_counter() - began))
        self._num_ended += 1

    def collect(self) -> StepOutput:
        """Wait for the oldest sampled step."""
        forwarded, launched, seconds = self._sampled.popleft()
        began = time.perf_counter()
        result = collect(launched)
        seconds += time.perf_counter() - began
        return StepOutput(
            forwarded.step.number,
            result.token_ids,
            result.logprobs,
            result.prompt_logprobs,
            forwarded.batch_seconds,
            forwarded.encode_seconds,
            forwarded.network_seconds + seconds,
            forwarded.failed_encodings,
            forwarded.sent,
        )

    def execute(self, step: StepInput, sampling: SamplingInput) -> StepOutput:
        self.submit(step)
        self.sample(sampling)
        return self.collect()

    def finished_jobs(self, timeout_seconds: float = 0.0) -> list[JobDone]:
        """Store the features that were encoded in the background, and return the jobs that ended."""
        finished = self.async_encoder.take(timeout_seconds)
        if finished is None:
            return []
        job, outcome = finished
        if (error := outcome.exception()) is not None:
            logger.error("encoding failed", job_id=job.job_id, exc_info=error)
            return [JobDone(job.job_id, 0.0, failed=True)]
        encoded = outcome.result()
        self.runner.encoder_outputs.update(encoded.features)
        return [JobDone(job.job_id, encoded.seconds)]

    def check_device(self) -> None:
        """Synchronise with a CUDA device, which raises if it has failed. Raises RuntimeError if ranks are out of step.

        After a call that failed, the other ranks may be waiting in a collective, and no later step could succeed.
        """
        if self.peers.ranks.size > 1 and self._is_in_step:
            raise RuntimeError("A step failed on rank 0 while the other ranks computed it.")
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)

    def close(self) -> None:
        self.peers.close(is_in_step=self._is_in_step)

    @property
    def _is_in_step(self) -> bool:
        """Whether a call is running; between calls, whether one has failed."""
        return self._num_ended < self._num_begun
