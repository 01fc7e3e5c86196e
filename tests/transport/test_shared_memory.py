"""Slots: reuse, budget, what a reader refuses, and what a crash leaves."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from tables import table

from saccade.protocol.media import SlotRef
from saccade.transport import shared_memory
from saccade.transport.shared_memory import FOLDER, HEADER_BYTES, Slot, SlotError, SlotPool, open_slot, read_slot, sweep

MIB = 1 << 20


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(8 * MIB)
    yield pool
    pool.close()


def _fill(slot: Slot, value: int = 1) -> bytes:
    data = bytes([value]) * slot.ref.nbytes
    with open_slot(slot.ref) as memory:
        memory[:] = data
    return data


def _acquire(pool: SlotPool, nbytes: int) -> Slot:
    slot = pool.acquire(nbytes)
    assert slot is not None
    return slot


def test_written_bytes_are_read(pool: SlotPool) -> None:  # [eng] 7
    slot = _acquire(pool, 100_001)
    data = np.arange(100_001, dtype=np.uint8)
    with open_slot(slot.ref) as memory:
        np.frombuffer(memory, np.uint8)[:] = data
    assert read_slot(slot.ref) == data.tobytes()
    assert (FOLDER / slot.ref.name).stat().st_mode & 0o777 == 0o600


def test_a_released_slot_is_used_again(pool: SlotPool) -> None:
    first = _acquire(pool, 70_000)
    _fill(first)
    pool.release(first.ref.name)
    second = _acquire(pool, 71_000)
    assert second.ref.name == first.ref.name
    assert second.ref.generation > first.ref.generation
    with pytest.raises(SlotError):  # not yet written
        read_slot(second.ref)
    _fill(second, 2)
    with pytest.raises(SlotError):  # the first use is over
        read_slot(first.ref)
    assert read_slot(second.ref) == b"\2" * 71_000


def test_release_twice_frees_once(pool: SlotPool) -> None:
    first = _acquire(pool, 70_000)
    pool.release(first.ref.name)
    pool.release(first.ref.name)
    pool.release("unknown")
    second, third = _acquire(pool, 70_000), _acquire(pool, 70_000)
    assert second.ref.name != third.ref.name
    assert pool.num_used == 2


def test_a_slot_is_free_when_its_last_holder_has_released_it(pool: SlotPool) -> None:
    slot = _acquire(pool, 70_000)
    pool.retain(slot.ref.name)
    pool.release(slot.ref.name)
    assert pool.num_used == 1
    pool.release(slot.ref.name)
    assert pool.num_used == 0
    assert _acquire(pool, 70_000).ref.name == slot.ref.name


def test_a_slot_that_somebody_may_still_read_is_never_used_again(pool: SlotPool) -> None:
    slot = _acquire(pool, 70_000)
    pool.retain(slot.ref.name)
    pool.release(slot.ref.name, reusable=False)
    assert (FOLDER / slot.ref.name).exists()
    pool.release(slot.ref.name)
    assert not (FOLDER / slot.ref.name).exists()
    assert pool.allocated_bytes == 0


@table("nbytes", [1, 65_536, 65_537, 81_921, 3_686_400, 50_331_648])
def test_a_slot_wastes_at_most_a_quarter(nbytes: int) -> None:
    pool = SlotPool(1 << 30)
    try:
        slot = _acquire(pool, nbytes)
        assert nbytes <= slot.capacity_bytes <= max(65_536, nbytes * 1.25)
    finally:
        pool.close()


def test_over_budget_there_is_no_slot(pool: SlotPool) -> None:
    assert pool.acquire(9 * MIB) is None
    slots = [_acquire(pool, MIB) for _ in range(8)]
    assert pool.acquire(MIB) is None
    for slot in slots[:4]:
        pool.release(slot.ref.name)
    assert _acquire(pool, 4 * MIB).capacity_bytes == 4 * MIB  # free slots of another size make room
    assert pool.allocated_bytes == 8 * MIB


def test_a_full_tmpfs_gives_no_slot() -> None:  # [eng] 19
    status = os.statvfs(FOLDER)
    before = set(FOLDER.glob(f"saccade-{os.getpid()}-*"))
    pool = SlotPool(1 << 60)
    assert pool.acquire(2 * status.f_blocks * status.f_frsize) is None
    assert pool.allocated_bytes == 0
    assert set(FOLDER.glob(f"saccade-{os.getpid()}-*")) == before


def test_close_leaves_nothing() -> None:  # [eng] 17
    pool = SlotPool(8 * MIB)
    names = [_acquire(pool, MIB).ref.name for _ in range(3)]
    pool.release(names[0])
    pool.close()
    assert not any((FOLDER / name).exists() for name in names)


def test_a_failed_write_is_not_readable(pool: SlotPool) -> None:
    slot = _acquire(pool, 1000)
    _fill(slot)
    with pytest.raises(ValueError, match="different structures"), open_slot(slot.ref) as memory:
        memory[:500] = bytes(501)
    with pytest.raises(SlotError):
        read_slot(slot.ref)


NAME = "saccade-1-1-0123456789abcdef"


@table(
    "name",
    [
        "", "..", "/etc/passwd", "../../etc/passwd", "saccade-1-1-0123456789abcdef/..", NAME + "\0", NAME + "\n", "x" * 500,
        "saccade-1-1-0123456789ABCDEF", "saccade-1-1", NAME,
    ],
)  # fmt: skip
def test_names_that_are_not_ours_are_refused(name: str) -> None:  # [eng] 21
    ref = SlotRef(name=name, generation=1, nbytes=4)
    with pytest.raises(SlotError):
        read_slot(ref)
    with pytest.raises(SlotError), open_slot(ref):
        pass


@pytest.mark.parametrize(
    "changed", [{"nbytes": 1001}, {"nbytes": 999}, {"nbytes": 1 << 62}, {"nbytes": -1}, {"generation": 2}]
)
def test_a_reference_must_match(pool: SlotPool, changed: dict[str, int]) -> None:  # [eng] 21
    slot = _acquire(pool, 1000)
    _fill(slot)
    with pytest.raises(SlotError):
        read_slot(msgspec.structs.replace(slot.ref, **changed))


@table("damage", ["magic", "short", "empty", "link", "fifo", "folder"])
def test_a_damaged_segment_is_refused(pool: SlotPool, damage: str) -> None:  # [eng] 16, 21
    slot = _acquire(pool, 100_000)
    _fill(slot)
    path = FOLDER / slot.ref.name
    if damage == "magic":
        with path.open("r+b") as file:
            file.write(b"somebody")
    elif damage in ("short", "empty"):
        os.truncate(path, HEADER_BYTES + 5 if damage == "short" else 0)
    else:
        path.unlink()
        {"link": lambda: path.symlink_to("/etc/hostname"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[
            damage
        ]()
    try:
        with pytest.raises(SlotError, match=slot.ref.name):
            read_slot(slot.ref)
        with pytest.raises(SlotError), open_slot(slot.ref):
            pass
    finally:
        if damage == "folder":
            path.rmdir()


OWNER = """
import sys, time
from saccade.transport.shared_memory import SlotPool, open_slot
pool = SlotPool(1 << 24)
for _ in range(3):
    with open_slot(pool.acquire(1000).ref) as memory:
        memory[:1] = b"x"
print("ready", flush=True)
time.sleep(60)
"""


def test_sweep_removes_only_segments_of_dead_processes(pool: SlotPool) -> None:  # [eng] 18
    kept = _acquire(pool, 1000)
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"ready\n"
            theirs = list(FOLDER.glob(f"saccade-{owner.pid}-*"))
            assert len(theirs) == 3
            sweep()
            assert all(path.exists() for path in theirs)
        finally:
            owner.send_signal(signal.SIGKILL)
    sweep()  # or another program of Saccade has done it
    assert not any(path.exists() for path in theirs)
    assert (FOLDER / kept.ref.name).exists()


def test_sweep_spares_owners_it_cannot_see() -> None:
    """A process of another container has an id of its own there; here the id is free, or somebody else's."""
    path = FOLDER / f"saccade-{os.getpid()}-1-{'0' * 16}"
    for namespace, survives in ((4_026_531_836 ^ 1, True), (os.stat("/proc/self/ns/pid").st_ino, False)):
        path.write_bytes(struct.pack("<8sQQQ", b"saccade1", 0, 0, namespace).ljust(HEADER_BYTES, b"\0"))
        sweep()
        assert path.exists() == survives
    path.unlink(missing_ok=True)


def test_namespace_is_the_same_for_neighbours() -> None:
    program = "from saccade.transport.shared_memory import namespace; print(namespace())"
    theirs = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert shared_memory.namespace() == theirs
    assert ":" in theirs


def test_segments_are_for_the_processes_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = shared_memory.readers()
    assert shared_memory.readers() == ours
    uid = os.geteuid() + 1
    monkeypatch.setattr(shared_memory.os, "geteuid", lambda: uid)
    assert shared_memory.readers() != ours


def test_a_segment_that_somebody_removed_is_not_handed_out_again(pool: SlotPool) -> None:
    lost = _acquire(pool, 70_000)
    pool.release(lost.ref.name)
    (FOLDER / lost.ref.name).unlink()
    _fill(_acquire(pool, 70_000))
    assert pool.num_used == 1
