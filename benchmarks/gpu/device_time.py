"""Time that the device takes for a call, apart from the host's: by CUDA's events, and by kernel."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch

WARM = 3
NAME_CHARACTERS = 70


def device_seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds that the device takes for *call*; on a CPU, the clock's."""
    for _ in range(min(WARM, repeats)):
        call()
    return statistics.median(_seconds(call) for _ in range(repeats))


def _seconds(call: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1000


class KernelTime(NamedTuple):
    """The *seconds* of all *count* launches of a kernel in one call."""

    name: str
    count: int
    seconds: float


def kernel_times(call: Callable[[], object]) -> list[KernelTime]:
    """Return the kernels of one call, those that take the most time first; none on a CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            counts[event.name[:NAME_CHARACTERS]] += 1
            seconds[event.name[:NAME_CHARACTERS]] += event.device_time / 1e6
    return sorted(
        (KernelTime(name, count, seconds[name]) for name, count in counts.items()), key=lambda one: -one.seconds
    )
