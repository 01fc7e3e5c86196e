"""Threads that share a kernel."""

import numpy as np
import pytest
from numba import carray

from saccade.nn.kernels import team


def counting() -> team.Kernel:
    """Count in each place how often it was written to, and how many had the same thread."""
    mine = team.sharing()

    def write(data):  # type: ignore[no-untyped-def]
        address, size = carray(data, 2, np.int64)
        out = carray(team.pointer(address), (2, size), np.int64)
        begin, end = mine(size)
        out[0, begin:end] += 1
        out[1, begin:end] = end - begin

    return team.Kernel(write)


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3, 7])
def test_every_part_is_done_once(num_threads: int) -> None:
    out = np.zeros((2, 100), np.int64)
    counting()((out.ctypes.data, 100), num_threads)
    assert out[0].tolist() == [1] * 100
    assert set(out[1]) <= {100 // max(1, num_threads), -(-100 // max(1, num_threads))}


def test_one_thread_does_all_of_it_where_there_is_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_runtime", lambda: None)
    team.sharing.cache_clear()
    out = np.zeros((2, 10), np.int64)
    counting()((out.ctypes.data, 10), 4)
    team.sharing.cache_clear()
    assert out.tolist() == [[1] * 10, [10] * 10]


def test_torchs_openmp_is_found() -> None:
    runtime = team._runtime()
    assert runtime is not None
    assert "torch" in str(runtime._name)
