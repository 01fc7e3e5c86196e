"""A transfer's pieces that were sent but not yet taken, and the shared memory that they hold."""

from collections import deque

from saccade.protocol.media import SlotRef
from saccade.transport import shared_memory
from saccade.transport.kv_transfer.channel import TransferFailed


class UntakenPieces:
    """The untaken pieces in the order in which they were sent, with their slots in *pool*.

    After `end_transfer`, no slot is in use, and none can be acquired even if the sending task runs once more before its
    cancellation reaches it.
    """

    def __init__(self, pool: shared_memory.SlotPool) -> None:
        self._pool: shared_memory.SlotPool | None = pool
        self._slots: deque[SlotRef | None] = deque()

    def add_piece(self, content: bytes, by_slot: bool) -> SlotRef | None:
        """Note a piece that is sent now, and return the slot with its content.

        Return None without *by_slot*, or if shared memory has no room. Raises TransferFailed after `end_transfer`.
        """
        if self._pool is None:
            raise TransferFailed("The transfer has ended.", by_peer=False)
        slot = self._pool.acquire(len(content)) if by_slot else None
        ref = None if slot is None else slot.ref
        self._slots.append(ref)
        if ref is None:
            return None
        try:
            with shared_memory.open_slot(ref) as data:
                data[:] = content
        except (shared_memory.SlotError, MemoryError):
            self._slots[-1] = None
            self._pool.release(ref.name, reusable=False)
            return None
        return ref

    def take_piece(self) -> None:
        """Note that the other end has used the oldest piece. Raises TransferFailed if there is none."""
        if not self._slots:
            raise TransferFailed("The decode worker took a piece that was not sent.")
        slot = self._slots.popleft()
        if slot is not None and self._pool is not None:
            self._pool.release(slot.name)

    def end_transfer(self) -> None:
        """Give back all slots, for good."""
        pool, self._pool = self._pool, None
        for slot in self._slots:
            if slot is not None and pool is not None:
                # The other end may still be reading.
                pool.release(slot.name, reusable=False)
        self._slots.clear()
