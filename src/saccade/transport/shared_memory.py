"""Passes pixels and KV state between processes on one machine, in pooled segments in /dev/shm.

For pixels, the gateway owns a SlotPool and hands out slots. A decode process fills one through its descriptor
(write_slot), the engine copies it out (read_slot), and the gateway takes it back (SlotPool.release). A segment is a
file: a header of 64 bytes, then the data. Every use of a segment has its own generation number, which is written after
the data. So a reader never mistakes another image's pixels, or half an image, for the image that it expects. Python's
resource tracker does not know the segments; sweep() removes those that a crash left behind.
"""

import mmap
import os
import re
import secrets
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from saccade.protocol.media import SlotRef

FOLDER = Path("/dev/shm")  # noqa: S108  POSIX shared memory, not a temporary folder
NAME = re.compile(r"saccade-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{16}")
HEADER_BYTES = 64
HEADER = struct.Struct("<8sQQQ")
"""Magic, generation (0: no complete data), bytes of data, inode of the owner's PID namespace."""

MAGIC = b"saccade1"
SMALLEST_SLOT_BYTES = 64 << 10
CLASSES_PER_OCTAVE = 4
OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class SlotError(Exception):
    """A slot does not exist, or does not match its SlotRef.

    The message gives the reason, and may be shown to clients.
    """


@dataclass(frozen=True)
class Slot:
    """One use of a segment: the reference for its writer and readers, and how many bytes of data the segment holds."""

    ref: SlotRef
    capacity_bytes: int


def namespace() -> str:
    """Return a name for this process's /dev/shm. Two processes see the same segments if their names are equal."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{FOLDER.stat().st_dev}"


def readers() -> str:
    """Return a name for this process's /dev/shm and user. Two processes can share slots if their names are equal."""
    return f"{namespace()}:{os.geteuid()}"


@dataclass
class _PooledSegment:
    """One of the pool's files. *generation* counts its uses; *holders* counts the users of its current content."""

    name: str
    capacity_bytes: int
    generation: int = 0
    holders: int = 0
    reusable: bool = True


@dataclass
class SlotPool:
    """A process's segments, which take at most *budget_bytes* in total, and are reused.

    Writing to a used segment is about ten times faster than to a fresh one, whose pages must be created. Not
    thread-safe.
    """

    budget_bytes: int
    _used: dict[str, _PooledSegment] = field(default_factory=dict)
    _free: list[_PooledSegment] = field(default_factory=list)
    _prefix: str = field(default_factory=lambda: f"saccade-{os.getpid()}-{start_time(os.getpid())}-")

    @property
    def num_used(self) -> int:
        """The number of slots that are handed out and not yet released."""
        return len(self._used)

    @property
    def allocated_bytes(self) -> int:
        """Total size in bytes of all segments, in use and free."""
        return sum(segment.capacity_bytes for segment in (*self._used.values(), *self._free))

    def acquire(self, nbytes: int) -> Slot | None:
        """Return a slot for *nbytes* of data.

        Return None if the budget or /dev/shm is full; the data must then travel inline.
        """
        capacity = _size_class(nbytes)
        segment = self._reuse(capacity) or self._create(capacity)
        if segment is None:
            return None
        segment.generation += 1
        segment.holders = 1
        self._used[segment.name] = segment
        return Slot(SlotRef(name=segment.name, generation=segment.generation, nbytes=nbytes), segment.capacity_bytes)

    def retain(self, name: str) -> None:
        """Add a holder to a slot in use; the slot returns to the pool when all holders have released it."""
        self._used[name].holders += 1

    def num_holders(self, name: str) -> int:
        """Return how many holders have not released the slot yet."""
        return self._used[name].holders if name in self._used else 0

    def release(self, name: str, *, reusable: bool = True) -> None:
        """End one holder's use of a slot. Does nothing if the name is not in use.

        Without *reusable*, the segment is removed after its last holder's release, because another process may still
        read it.
        """
        segment = self._used.get(name)
        if segment is None:
            return
        segment.holders -= 1
        segment.reusable &= reusable
        if segment.holders == 0:
            del self._used[name]
            if segment.reusable:
                self._free.append(segment)
            else:
                unlink(name)

    def close(self) -> None:
        """Unlink every segment. Readers that have a segment open can finish."""
        for segment in (*self._used.values(), *self._free):
            unlink(segment.name)
        self._used.clear()
        self._free.clear()

    def _reuse(self, capacity: int) -> _PooledSegment | None:
        for index in reversed(range(len(self._free))):
            if self._free[index].capacity_bytes == capacity:
                segment = self._free.pop(index)
                if exists(segment.name):
                    return segment
        return None

    def _create(self, capacity: int) -> _PooledSegment | None:
        while self.allocated_bytes + capacity > self.budget_bytes:
            if not self._free:
                return None
            # The segment that was unused for the longest time goes first; it does not have the right size.
            unlink(self._free.pop(0).name)
        segment = _PooledSegment(self._prefix + secrets.token_hex(8), capacity)
        return segment if _allocate(segment) else None


def _allocate(segment: _PooledSegment) -> bool:
    try:
        descriptor = os.open(FOLDER / segment.name, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600)
    except OSError:
        return False
    try:
        # Unlike ftruncate, this fails now when /dev/shm is full, not with SIGBUS at the first write.
        os.posix_fallocate(descriptor, 0, HEADER_BYTES + segment.capacity_bytes)
        os.pwrite(descriptor, HEADER.pack(MAGIC, 0, 0, pid_namespace()), 0)
    except OSError:
        unlink(segment.name)
        return False
    finally:
        os.close(descriptor)
    return True


@contextmanager
def open_slot(ref: SlotRef) -> Iterator[memoryview]:
    """Open the slot's segment and provide its ref.nbytes bytes for writing, as write_slot does.

    Raises the same errors, and SlotError if there is no such segment.
    """
    descriptor = open_descriptor(ref)
    try:
        with write_slot(descriptor, ref) as data:
            yield data
    finally:
        os.close(descriptor)


def open_descriptor(ref: SlotRef) -> int:
    """Return a descriptor of the slot's segment for write_slot; the caller closes it. Raises SlotError."""
    return _open(ref.name, os.O_RDWR)


@contextmanager
def write_slot(descriptor: int, ref: SlotRef) -> Iterator[memoryview]:
    """Provide the slot's ref.nbytes bytes for writing. They count as written if the block ends without an exception.

    Raises SlotError if the segment is not Saccade's or is too short, and MemoryError if it cannot be mapped.
    """
    owner = _header(descriptor, ref)[2]
    # The header goes through the mapping too: a decode process may not write to files.
    memory = _mapped(descriptor, HEADER_BYTES + ref.nbytes)
    HEADER.pack_into(memory, 0, MAGIC, 0, 0, owner)
    yield memory[HEADER_BYTES:]
    HEADER.pack_into(memory, 0, MAGIC, ref.generation, ref.nbytes, owner)


def _mapped(descriptor: int, length: int) -> memoryview:
    try:
        # One call that maps all pages costs a tenth of a fault for each. The mapping lives as long as its last view.
        return memoryview(mmap.mmap(descriptor, length, mmap.MAP_SHARED | mmap.MAP_POPULATE))
    except OSError as error:
        raise MemoryError from error


def read_slot(ref: SlotRef) -> bytes:
    """Return a copy of the slot's data. Raises SlotError unless it holds exactly what *ref* promises."""
    descriptor = _open(ref.name, os.O_RDONLY)
    try:
        _check_complete(descriptor, ref)
        data = os.pread(descriptor, ref.nbytes, HEADER_BYTES)
        # The owner may have given the slot to another image while it was copied.
        _check_complete(descriptor, ref)
    finally:
        os.close(descriptor)
    if len(data) != ref.nbytes:
        raise SlotError(f"The shared-memory slot {ref.name} gave {len(data)} of {ref.nbytes} bytes.")
    return data


def sweep() -> int:
    """Remove segments whose owner is dead; return their number. Segments of other PID namespaces stay."""
    removed = 0
    for path in FOLDER.glob("saccade-*"):
        match = NAME.fullmatch(path.name)
        if match and start_time(int(match[1])) != int(match[2]) and _owned_here(path.name):
            removed += unlink(path.name)
    return removed


def _owned_here(name: str) -> bool:
    try:
        descriptor = _open(name, os.O_RDONLY)
    except SlotError:
        return False
    try:
        header = os.pread(descriptor, HEADER.size, 0)
    finally:
        os.close(descriptor)
    # A crash between creation and header leaves zeros or nothing: such a segment is not in use.
    return not any(header) or (len(header) == HEADER.size and HEADER.unpack(header)[3] == pid_namespace())


def _size_class(nbytes: int) -> int:
    """Round up to one of four sizes per octave: at most 25 % waste, and few enough sizes that slots are reused."""
    size = max(nbytes, SMALLEST_SLOT_BYTES)
    step = (1 << (size - 1).bit_length() - 1) // CLASSES_PER_OCTAVE
    return -(-size // step) * step


def start_time(pid: int) -> int:
    """Return the process's start time in clock ticks since boot (proc(5), stat, field 22), or 0 if it is not alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def pid_namespace() -> int:
    """Return the inode that names this process's PID namespace."""
    return os.stat("/proc/self/ns/pid").st_ino


def _open(name: str, flags: int) -> int:
    if not NAME.fullmatch(name):
        raise SlotError(f"{name[:80]!r} is not the name of a shared-memory slot.")
    try:
        descriptor = os.open(FOLDER / name, flags | OPEN_FLAGS)
    except OSError:
        raise SlotError(f"There is no shared-memory slot {name}.") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SlotError(f"The shared-memory slot {name} is not a regular file.")
    return descriptor


def _header(descriptor: int, ref: SlotRef) -> tuple[int, int, int]:
    """Return the generation, the size of the data in bytes, and the owner's PID namespace from the segment's header.

    Raises SlotError if the segment has no such header, or is too short for *ref*.
    """
    header = os.pread(descriptor, HEADER.size, 0)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise SlotError(f"The shared-memory slot {ref.name} has no header of Saccade's.")
    if not 0 <= ref.nbytes <= os.fstat(descriptor).st_size - HEADER_BYTES:
        raise SlotError(f"The shared-memory slot {ref.name} is too short for {ref.nbytes} bytes.")
    _, generation, nbytes, owner = HEADER.unpack(header)
    return generation, nbytes, owner


def _check_complete(descriptor: int, ref: SlotRef) -> None:
    generation, nbytes, _ = _header(descriptor, ref)
    if (generation, nbytes) != (ref.generation, ref.nbytes):
        raise SlotError(
            f"The shared-memory slot {ref.name} holds {nbytes} bytes of use {generation}, "
            f"not {ref.nbytes} of use {ref.generation}."
        )


def exists(name: str) -> bool:
    """Return whether the segment still exists; another program may have cleaned up /dev/shm."""
    return os.path.lexists(FOLDER / name)


def unlink(name: str) -> bool:
    """Remove the name from FOLDER; return whether it was there. Processes that have the file open keep it."""
    try:
        os.unlink(FOLDER / name)
    except OSError:
        return False
    return True
