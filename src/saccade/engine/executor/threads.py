"""Choose the number of threads for a step on the CPU."""

import os
from dataclasses import dataclass

import torch

SERIAL_PARAMETERS = 1 << 25
SERIAL_WORK = 1 << 31
SERIAL_CONTEXT = 1 << 14
"""A step below these limits runs on one thread: the network's parameters, the step's multiply-adds, and cached tokens.

Such a step is many small operations over weights in the CPU caches. A second thread makes it at most a quarter faster,
but spins between operations and in the pause after the step. It then occupies the core that gateway, front and client
need to deliver the step's tokens. On two cores, answers are faster with one thread, at two thirds of the CPU time
(benchmarks/engine).
"""


@dataclass(frozen=True)
class Threads:
    """Gives steps *count* threads, or one if they have at most *serial_tokens* tokens and short contexts."""

    count: int
    serial_tokens: int

    def use(self, num_tokens: int, num_context_tokens: int) -> None:
        """Set torch's threads for a step of *num_tokens*, patches included, over *num_context_tokens* in total."""
        serial = num_tokens <= self.serial_tokens and num_context_tokens <= SERIAL_CONTEXT
        torch.set_num_threads(1 if serial else self.count)


def choose_threads(configured: int | None, num_parameters: int, num_ranks: int = 1) -> Threads:
    """Return the threads of one rank: those configured, else OMP_NUM_THREADS, else its share of all cores but one.

    OpenMP's threads spin while they wait for one another. On every core, they would compete with the gateway, front and
    decode processes, and both sides would be slow.
    """
    if configured is not None:
        count = configured
    elif "OMP_NUM_THREADS" in os.environ:
        count = torch.get_num_threads()
    else:
        count = max(1, (len(os.sched_getaffinity(0)) - 1) // num_ranks)
    return Threads(count, SERIAL_WORK // num_parameters if num_parameters <= SERIAL_PARAMETERS else 0)
