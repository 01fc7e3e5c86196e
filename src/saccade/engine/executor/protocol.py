"""The engine's interface to the component that computes its steps."""

from typing import Protocol

from saccade.engine.core.step import JobDone, SamplingInput, StepInput, StepOutput


class Executor(Protocol):
    """Computes steps in the order of submission. Executors that get the same values hold the same state.

    Each step is submitted, sampled and collected once. An exception in one of these calls ends the step's requests; the
    executor continues with the next step, unless check_device() raises.
    """

    device: str
    dtype: str

    def submit(self, step: StepInput) -> None:
        """Start to compute *step*."""

    def sample(self, sampling: SamplingInput) -> None:
        """Start to draw the tokens of the oldest unsampled step; *sampling* must have its number."""

    def collect(self) -> StepOutput:
        """Wait for the output of the oldest sampled step, and return it."""

    def execute(self, step: StepInput, sampling: SamplingInput) -> StepOutput:
        """Submit, sample and collect one step."""

    def finished_jobs(self, timeout_seconds: float = 0.0) -> list[JobDone]:
        """Return the background jobs that ended, each once; wait at most *timeout_seconds* for one."""

    def check_device(self) -> None:
        """Raise if the device has failed, so that no later step could succeed."""

    def close(self) -> None:
        """End everything that was started. No call may follow."""
