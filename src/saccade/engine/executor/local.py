"""The executor in the engine's process: a single device, or rank 0 of several."""

import time
from collections import deque

import msgspec
import torch

from saccade.engine.core.step import SamplingInput, StepInput, StepOutput
from saccade.engine.executor.model_runner import Drawing, ModelRunner, collect_results
from saccade.engine.executor.ranks.peers import Peers


class LocalExecutor:
    """An executor.protocol.Executor with one ModelRunner, and *peers*: the other ranks, each with its own runner."""

    def __init__(self, runner: ModelRunner, peers: Peers | None = None) -> None:
        self.runner = runner
        self.peers = Peers() if peers is None else peers
        self._launched: deque[tuple[StepOutput, Drawing, float]] = deque()
        self._is_in_step = False
        """Whether a call is running; between calls, whether the last one has failed."""

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        if sampling.number != step.number:
            raise ValueError(f"step {step.number} cannot be sampled as step {sampling.number}")
        self._is_in_step = True
        if self.peers.ranks.size > 1:
            self.peers.launch(step, sampling)
        self.runner.update(step)
        forwarded = self.runner.forward(step)
        began = time.perf_counter()
        drawing = self.runner.draw(forwarded, sampling)
        self._launched.append((forwarded.output, drawing, time.perf_counter() - began))
        self._is_in_step = False

    def collect_output(self) -> StepOutput:
        output, drawing, seconds = self._launched.popleft()
        began = time.perf_counter()
        output = collect_results(drawing, output)
        seconds += output.network_seconds + time.perf_counter() - began
        return msgspec.structs.replace(output, network_seconds=seconds)

    def check_device(self) -> None:
        """Synchronise with a CUDA device; this raises if the device has failed.

        Raises RuntimeError if a step failed here while other ranks computed it. These may be waiting in a collective,
        so no later step could succeed.
        """
        if self.peers.ranks.size > 1 and self._is_in_step:
            raise RuntimeError("A step failed on rank 0 while the other ranks computed it.")
        if self.runner.device.type == "cuda":
            torch.cuda.synchronize(self.runner.device)

    def close(self) -> None:
        self.peers.close(is_in_step=self._is_in_step)
