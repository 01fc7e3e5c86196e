"""Work on many weights at once while a model is loaded: a weight for each thread, instead of all threads for a weight.

Threads of one operation wait for each other after each of many short operations, which costs most of the time if other
programs run. Threads with weights of their own do not wait.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_on_cores(work: Callable[[Item], Result], items: Iterable[Item], device: torch.device) -> Iterator[Result]:
    """Yield work(item) for each of *items*, in order; on a CPU, as many at a time as torch has threads."""
    count = torch.get_num_threads() if device.type == "cpu" else 1
    if count == 1:
        yield from map(work, items)
        return
    # The number of threads is set for the calling thread alone.
    with ThreadPoolExecutor(count, "weights", partial(torch.set_num_threads, 1)) as pool:
        yield from pool.map(work, items)
