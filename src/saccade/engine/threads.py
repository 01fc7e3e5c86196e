"""How many threads a step on the CPU gets."""

import os
from dataclasses import dataclass

import torch

SERIAL_PARAMETERS = 1 << 25
SERIAL_WORK = 1 << 31
SERIAL_CONTEXT = 1 << 14
"""Parameters of a network, multiply-adds of a step, and cached tokens attended to, up to which it runs on one thread.

Such a step is many small operations over weights that caches hold. A second thread makes it a quarter faster by itself
at the most, but spins between them and in the pause behind the step, on the core that gateway, front and client need to
pass the step's tokens on: served with two cores, answers come faster with one thread, at two thirds of the CPU
(benchmarks/engine).
"""


@dataclass(frozen=True)
class Threads:
    """*count* threads, but one for steps of up to *serial_tokens* tokens with short contexts."""

    count: int
    serial_tokens: int

    @property
    def aside(self) -> int:
        """Of them, those that encode pictures beside the steps; 0 where there is one thread for everything."""
        return self.count // 2

    def use(self, num_tokens: int, num_context_tokens: int, beside_pictures: bool = False) -> None:
        """Have torch compute a step of *num_tokens*, pictures' patches among them, over all sequences' contexts."""
        serial = num_tokens <= self.serial_tokens and num_context_tokens <= SERIAL_CONTEXT
        torch.set_num_threads(1 if serial else self.count - (self.aside if beside_pictures else 0))


def choose_threads(configured: int | None, num_parameters: int) -> Threads:
    """Return the configured threads, else OMP_NUM_THREADS, else one less than there are cores.

    OpenMP's threads spin while they wait for one another: on every core, they would starve gateway, front and decode
    processes, and be starved by them.
    """
    if configured is not None:
        count = configured
    elif "OMP_NUM_THREADS" in os.environ:
        count = torch.get_num_threads()
    else:
        count = max(1, len(os.sched_getaffinity(0)) - 1)
    return Threads(count, SERIAL_WORK // num_parameters if num_parameters <= SERIAL_PARAMETERS else 0)
