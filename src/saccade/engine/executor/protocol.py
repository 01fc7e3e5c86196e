"""The engine's interface to the component that computes its steps."""

from typing import Protocol

from saccade.engine.core.step import SamplingInput, StepInput, StepOutput


class Executor(Protocol):
    """Computes steps in the order of their launch. Executors that get the same values hold the same state.

    Each step is launched and collected once; another one may be launched before it is collected. An exception in one of
    these calls ends the step's requests; the executor continues with the next step, unless check_device() raises.
    """

    def launch(self, step: StepInput, sampling: SamplingInput) -> None:
        """Start computing *step* and drawing its tokens; on a CPU, finish both. *sampling* has the step's number."""

    def collect_output(self) -> StepOutput:
        """Wait for the output of the oldest launched step, and return it."""

    def check_device(self) -> None:
        """Raise if the device has failed, so that no later step could succeed."""

    def close(self) -> None:
        """End everything that was started. No call may follow."""
