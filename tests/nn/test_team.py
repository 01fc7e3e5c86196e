"""Threads that share a kernel."""

import numpy as np
import pytest
from numba import carray

from saccade.nn.kernels import team
from saccade.nn.kernels.machine_code import Body


@team.kernel()
def counting() -> Body:
    """Count in each place how often it was written to, and how many had the same thread."""

    def write(data):  # type: ignore[no-untyped-def]
        address, size = carray(data, 2, np.int64)
        out = carray(team.pointer(address), (2, size), np.int64)
        begin, end = team.own_share(size)
        for i in range(begin, end):
            out[0, i] += 1
            out[1, i] = end - begin

    return write


@pytest.mark.parametrize("num_threads", [0, 1, 2, 3, 7])
def test_every_part_is_done_once(num_threads: int) -> None:
    out = np.zeros((2, 100), np.int64)
    counting()((out.ctypes.data, 100), num_threads)
    assert out[0].tolist() == [1] * 100
    assert set(out[1]) <= {100 // max(1, num_threads), -(-100 // max(1, num_threads))}


def test_one_thread_does_all_of_it_where_there_is_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_runtime", lambda: None)
    team._link_runtime.cache_clear()
    counting.cache_clear()
    out = np.zeros((2, 10), np.int64)
    counting()((out.ctypes.data, 10), 4)
    team._link_runtime.cache_clear()
    counting.cache_clear()
    assert out.tolist() == [[1] * 10, [10] * 10]


@team.kernel()
def whereabouts() -> Body:
    """Write down where each part's thread has its room, filled with the part's number."""

    def write(data):  # type: ignore[no-untyped-def]
        address, size, start, nbytes = carray(data, 4, np.int64)
        begin, end = team.own_share(size)
        room = carray(team.pointer(team.room(start, nbytes)), nbytes, np.uint8)
        for i in range(begin, end):
            carray(team.pointer(address), size, np.int64)[i] = team.room(start, nbytes)
            for place in range(nbytes):
                room[place] = i

    return write


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_every_thread_has_a_room_of_its_own(num_threads: int) -> None:
    out = np.zeros(max(1, num_threads), np.int64)
    whereabouts()((out.ctypes.data, len(out)), num_threads, room_bytes=100)
    assert not (out % team.LINE_BYTES).any()
    assert (np.diff(out) == 2 * team.LINE_BYTES).all()


def test_no_room_is_an_error() -> None:
    """Memory that a kernel asked for itself, in vain, would have left its output as it was."""
    out = np.zeros(1, np.int64)
    with pytest.raises(MemoryError):
        whereabouts()((out.ctypes.data, 1), room_bytes=1 << 60)
    assert not out.any()


def test_torchs_openmp_is_found() -> None:
    runtime = team._runtime()
    assert runtime is not None
    assert "torch" in str(runtime._name)
