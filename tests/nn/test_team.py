"""Threads that share a kernel."""

import numpy as np
import pytest
from numba import carray

from saccade.nn.kernels import team


def write(arguments, part, count):  # type: ignore[no-untyped-def]
    """Count in each place how often it was written to, and by how many threads the work was shared."""
    address, size = arguments
    out = carray(team.pointer(address), (2, size), np.int64)
    begin, end = team.section(size, part, count)
    out[0, begin:end] += 1
    out[1, begin:end] = count


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3, 7])
def test_every_part_is_done_once(num_threads: int) -> None:
    kernel = team.member(2, write)
    out = np.zeros((2, 100), np.int64)
    team.share(kernel, np.array((out.ctypes.data, 100), np.int64), num_threads)
    assert out.tolist() == [[1] * 100, [max(1, num_threads)] * 100]


def test_one_thread_does_all_of_it_where_there_is_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_runtime", lambda: None)
    kernel = team.member(2, write)
    out = np.zeros((2, 10), np.int64)
    team.share(kernel, np.array((out.ctypes.data, 10), np.int64), 4)
    assert out.tolist() == [[1] * 10, [1] * 10]


def test_torchs_openmp_is_found() -> None:
    runtime = team._runtime()
    assert runtime is not None
    assert "torch" in str(runtime._name)
