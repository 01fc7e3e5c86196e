"""Lends our shared-memory slots under names that a consumer may unlink.

On SMG's wires, a same-host tensor is a file in /dev/shm. The consumer opens it by name, reads nbytes at an offset, and
unlinks the name (smg_grpc_servicer/mm_shm.py). Saccade sends a hard link to a pooled segment, so the segment stays
and is used again. Its pages need not be allocated again, which is most of the cost of a fresh segment.

A link that is gone was read. One that still exists when the request ends may be open, now or soon: it is unlinked, and
its slot is not used again.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from saccade.protocol.media import SlotRef
from saccade.transport import shared_memory
from saccade.transport.shared_memory import FOLDER, HEADER, HEADER_BYTES, MAGIC, OPEN_FLAGS

NAME = re.compile(r"smg-tokenspeed-([0-9]{1,10})-([0-9]{1,20})-[0-9]{1,20}")
"""Owner's pid, nanoseconds, a counter: SMG's own form, so that an SMG gateway's sweep removes ours too."""

OFFSET = HEADER_BYTES
"""Where the data of a link begins: the segment's header is ours alone.

It must not be 0: TokenSpeed's front copies such a tensor before it unlinks the name. At offset 0 it hands the
name on to its ranks, some of which may still read when the first has unlinked it.
"""


@dataclass
class Links:
    """The *slots* of one request, one name for each image: lend() or put_back() each, collect(), then settle()."""

    on_released: Callable[[Sequence[str]], None]
    on_discarded: Callable[[Sequence[str]], None]
    slots: list[str]
    _loans: dict[str, str] = field(default_factory=dict)

    def lend(self, slot: SlotRef) -> str | None:
        """Return a new name for the data of *slot*, or None if no link can be made."""
        name = f"smg-tokenspeed-{os.getpid()}-{time.clock_gettime_ns(time.CLOCK_BOOTTIME)}-{len(self._loans)}"
        try:
            os.link(FOLDER / slot.name, FOLDER / name)
        except OSError:
            return None
        self.slots.remove(slot.name)
        self._loans[name] = slot.name
        return name

    def put_back(self, slot: SlotRef) -> None:
        """Release *slot*, whose name no consumer has received."""
        self.slots.remove(slot.name)
        self.on_released([slot.name])

    def collect(self) -> None:
        """Release the slots whose links the consumer has unlinked."""
        if not self._loans:
            return
        consumed = [name for name in self._loans if not os.path.lexists(FOLDER / name)]
        if consumed:
            self.on_released([self._loans.pop(name) for name in consumed])

    def settle(self, *, sent: bool) -> None:
        """Release the remaining slots; but discard those whose link still exists, if it was *sent* to a consumer."""
        unread = {name for name in self._loans if shared_memory.unlink(name) and sent}
        discarded = [self._loans[name] for name in unread]
        released = self.slots + [slot for name, slot in self._loans.items() if name not in unread]
        self.slots = []
        self._loans = {}
        if released:
            self.on_released(released)
        if discarded:
            self.on_discarded(discarded)


def sweep() -> int:
    """Remove links to our segments that a dead process of this PID namespace left behind; return how many."""
    return sum(shared_memory.unlink(path.name) for path in FOLDER.glob("smg-tokenspeed-*") if _stale(path))


def _stale(path: Path) -> bool:
    """Return whether *path* is our link and its maker is dead: no process has its pid, or one that began later."""
    match = NAME.fullmatch(path.name)
    if match is None or not _ours(path):
        return False
    ticks = shared_memory.start_time(int(match[1]))
    return ticks == 0 or ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK") > int(match[2])


def _ours(path: Path) -> bool:
    """Return whether the file has a segment's header, of this PID namespace. SMG's own files and others' have none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError:
        return False
    try:
        header = os.pread(descriptor, HEADER.size, 0)
    finally:
        os.close(descriptor)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        return False
    return bool(HEADER.unpack(header)[3] == shared_memory.pid_namespace())
