"""A request's image, and the pins that say how long its encoder output is needed.

A request's samples share an image, with one slot and one copy of its bytes. Without a pin, a cache may drop the encoder
output at any time. A slot is read only when its image is about to be encoded. Its bytes are then kept until the request
ends, because a preempted sequence may have to encode the image again. For the same reason a slot that was never read
goes back to the gateway when the request ends. Either way, the slot's name is released exactly once.
"""

from enum import Enum, auto
from typing import NamedTuple

from saccade.errors import WorkerFailed
from saccade.protocol.media import MediaItem, SlotRef
from saccade.transport.shared_memory import SlotError, read_slot


class EncoderKey(NamedTuple):
    """Identifies an encoder output. *content_hash* covers content and processor settings; *salt* is the tenant's."""

    salt: bytes
    modality: str
    content_hash: bytes
    grid: tuple[int, int, int]
    original_size: tuple[int, int] | None = None


class Until(Enum):
    """How long a sample needs an encoder output."""

    COMPUTED = auto()
    """Until the sample's tokens that show the image are computed: its chunks read the encoder output."""
    ENDED = auto()
    """Until the sample ends: the pixels never came, and the gateway may have dropped the image."""


class RequestImage:
    """One image of a request.

    - end: the index after its last token.
    - param: names the image in errors.
    - pins: pairs of a sample's index and an Until, which EncoderCache sets and removes.
    - is_requested: whether the gateway was asked for the pixels, so that every sample waits for its answer.
    """

    __slots__ = ("_inline", "_slot", "end", "is_requested", "key", "param", "pins")

    def __init__(self, item: MediaItem, salt: bytes, param: str) -> None:
        self.key = EncoderKey(salt, item.modality, item.content_hash, item.grid, item.original_size)
        self.end = item.spans[-1].start + item.spans[-1].length
        self.param = param
        self.pins: set[tuple[int, Until]] = set()
        self.is_requested = False
        self._inline = item.inline
        self._slot = item.slot

    @property
    def has_pixels(self) -> bool:
        """Whether pixels are available to encode the image (again)."""
        return self._inline is not None or self._slot is not None

    def is_claimed(self, sample: int) -> bool:
        """Whether a chunk of *sample* has pinned the encoder output to read it."""
        return (sample, Until.COMPUTED) in self.pins

    def bring(self, slot: SlotRef | None, inline: bytes | None) -> None:
        """Store the pixels from the gateway's answer."""
        self.is_requested = False
        self._slot, self._inline = slot, inline

    def read_patches(self, slot_names: list[str]) -> bytes:
        """Return the patches. If a slot was read, add its name to *slot_names*.

        Raises WorkerFailed if there are no pixels or the slot cannot be read; afterwards the image has no pixels.
        """
        if self._inline is None and (slot := self._slot) is not None:
            self._give_up_slot(slot_names)
            try:
                self._inline = read_slot(slot)
            except SlotError as error:
                raise WorkerFailed("The image's pixels could not be read from shared memory.", self.param) from error
        if self._inline is None:
            raise WorkerFailed("The worker does not hold this image, and received no pixels for it.", self.param)
        return self._inline

    def release(self, slot_names: list[str]) -> None:
        """Drop the image as its request ends. If it still holds a slot, add the slot's name to *slot_names*."""
        self._give_up_slot(slot_names)
        self._inline = None

    def _give_up_slot(self, slot_names: list[str]) -> None:
        if self._slot is not None:
            slot_names.append(self._slot.name)
            self._slot = None
