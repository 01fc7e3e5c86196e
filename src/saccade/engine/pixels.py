"""Where a sequence's pixels are, and when their shared-memory slot goes back to the gateway.

A slot is read only when its picture is about to be encoded. Its bytes are then kept until the request ends, because a
retracted sequence may have to encode the picture again. For the same reason a slot that was never read, because a cache
held the picture, goes back when the request ends. Either way its name is given up exactly once, also where several
samples show the picture.
"""

from saccade.engine.encoder_cache import EncoderKey
from saccade.errors import WorkerFailed
from saccade.protocol.media import MediaItem, SlotRef
from saccade.transport.shared_memory import SlotError, read_slot


class _Pixels:
    """Where the pixels are now; one for all samples of a request."""

    __slots__ = ("asked", "brought", "inline", "slot")

    def __init__(self, inline: bytes | None, slot: SlotRef | None) -> None:
        self.inline = inline
        self.slot = slot
        self.brought = inline is not None or slot is not None


class PixelSource:
    """One picture of one sequence. *end* is the index behind its last placeholder token.

    *pinned*: the sequence has a pin on the encoding; *held*: the pin stays until the other samples have theirs.
    *kept*: the sequence, which came without pixels, has another pin until it ends.
    """

    __slots__ = ("_pixels", "end", "held", "kept", "key", "param", "pinned")

    def __init__(self, item: MediaItem, salt: bytes, param: str) -> None:
        self.key = EncoderKey(salt, item.modality, item.content_hash, item.grid)
        self.end = item.spans[-1].start + item.spans[-1].length
        self.param = param
        self.pinned = self.held = self.kept = False
        self._pixels = _Pixels(item.inline, item.slot)

    def share_pixels(self, other: "PixelSource") -> None:
        """Use the pixels of *other*, the same picture in another sample: one slot, one copy of what lies in it."""
        self._pixels = other._pixels

    @property
    def available(self) -> bool:
        """Whether the picture could be encoded (again)."""
        return self._pixels.inline is not None or self._pixels.slot is not None

    def bring(self, slot: SlotRef | None, inline: bytes | None) -> None:
        """Take the gateway's answer, for every sample."""
        self._pixels.slot, self._pixels.inline, self._pixels.brought = slot, inline, True

    @property
    def brought(self) -> bool:
        """Whether pixels came, with the request or later, readable or not."""
        return self._pixels.brought

    def read(self, released: list[str]) -> bytes:
        """Return the patches; a slot that was read goes to *released*. Raises WorkerFailed where there are none."""
        if self._pixels.inline is None:
            self._pixels.inline = self._copy(released)
        return self._pixels.inline

    def _copy(self, released: list[str]) -> bytes:
        if self._pixels.slot is None:
            raise WorkerFailed(
                "The worker does not hold this picture, and no pixels came with the request.", self.param
            )
        try:
            return read_slot(self._pixels.slot)
        except SlotError as error:
            raise WorkerFailed("The picture's pixels could not be read from shared memory.", self.param) from error
        finally:
            self.release_slot(released)

    def release_slot(self, released: list[str]) -> None:
        """Give up the slot, if one is still held, by adding its name to *released*."""
        if self._pixels.slot is not None:
            released.append(self._pixels.slot.name)
            self._pixels.slot = None
