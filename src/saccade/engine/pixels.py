"""Where a sequence's pixels are, and when their shared-memory slot goes back to the gateway.

A slot is read only when its picture is about to be encoded. Its bytes are then kept until the request ends, because a
retracted sequence may have to encode the picture again. For the same reason a slot that was never read, because a cache
held the picture, goes back when the request ends. Either way its name is given up exactly once.
"""

from saccade.engine.encoder_cache import EncoderKey
from saccade.errors import WorkerFailed
from saccade.protocol.media import MediaItem
from saccade.transport.shared_memory import SlotError, read_slot


class PixelSource:
    """One picture of one sequence. *end* is the index behind its last placeholder token."""

    __slots__ = ("_inline", "_slot", "end", "grid", "key", "num_patches", "param", "pinned")

    def __init__(self, item: MediaItem, salt: bytes, param: str) -> None:
        self.key = EncoderKey(salt, item.modality, item.content_hash, item.grid)
        self.grid = item.grid
        self.num_patches = item.grid[0] * item.grid[1] * item.grid[2]
        self.end = item.spans[-1].start + item.spans[-1].length
        self.param = param
        self.pinned = False
        self._inline = item.inline
        self._slot = item.slot

    @property
    def available(self) -> bool:
        """Whether the picture could be encoded (again)."""
        return self._inline is not None or self._slot is not None

    def read(self, released: list[str]) -> bytes:
        """Return the patches; a slot that was read goes to *released*. Raises WorkerFailed where there are none."""
        if self._inline is None:
            self._inline = self._copy(released)
        return self._inline

    def _copy(self, released: list[str]) -> bytes:
        if self._slot is None:
            raise WorkerFailed(
                "The worker does not hold this picture, and no pixels came with the request.", self.param
            )
        try:
            return read_slot(self._slot)
        except SlotError as error:
            raise WorkerFailed("The picture's pixels could not be read from shared memory.", self.param) from error
        finally:
            self.release_slot(released)

    def release_slot(self, released: list[str]) -> None:
        """Give up the slot, if one is still held, by adding its name to *released*."""
        if self._slot is not None:
            released.append(self._slot.name)
            self._slot = None
