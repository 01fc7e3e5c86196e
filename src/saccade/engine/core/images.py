"""The state of an image in a request, and the pins that say how long its encoder output is needed.

The samples of a request share an image: one slot, one copy of its bytes, one state. An image is encoding or encoded
exactly while it has a pin; without a pin, a cache may drop the encoder output at any time. A slot is read only when its
image is about to be encoded. Its bytes are then kept until the request ends, because a preempted sequence may have to
encode the image again. For the same reason, a slot that was never read goes back to the gateway only when the request
ends. In both cases the slot's name is released exactly once.
"""

from collections.abc import Collection, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple

from saccade.errors import WorkerFailed
from saccade.protocol.media import MediaItem, SlotRef
from saccade.transport.shared_memory import SlotError, read_slot


class EncoderKey(NamedTuple):
    """Identifies an encoder output: tenant, modality, image with its processor's settings, grid and original size."""

    salt: bytes
    modality: str
    content_hash: bytes
    grid: tuple[int, int, int]
    original_size: tuple[int, int] | None = None


class State(Enum):
    """The state of an image within its request."""

    EXPECTED = auto()
    """The pixels are not here: the gateway believes that a cache holds the image."""
    REQUESTED = auto()
    """The gateway was asked for the pixels; every sample waits for its answer."""
    AT_HAND = auto()
    """The pixels are here."""
    ENCODING = auto()
    """The image is being encoded, from these pixels or from those of another request."""
    ENCODED = auto()
    """A cache holds the encoder output."""
    RELEASED = auto()
    """The request has ended."""


TRANSITIONS: Mapping[State, frozenset[State]] = MappingProxyType({
    State.EXPECTED: frozenset({State.REQUESTED, State.ENCODING, State.ENCODED, State.RELEASED}),
    State.REQUESTED: frozenset({State.AT_HAND, State.RELEASED}),
    State.AT_HAND: frozenset({State.ENCODING, State.ENCODED, State.RELEASED}),
    State.ENCODING: frozenset({State.ENCODED, State.AT_HAND, State.EXPECTED}),
    State.ENCODED: frozenset({State.AT_HAND, State.EXPECTED}),
    State.RELEASED: frozenset(),
})  # fmt: skip
"""The states that may follow each state."""


class Until(Enum):
    """How long a sample needs an encoder output."""

    COMPUTED = auto()
    """Until the sample's tokens that show the image are computed."""
    STARTED = auto()
    """Until the request's other samples have started: they need the encoder output too, and set their own pins."""
    ENDED = auto()
    """Until the sample ends: the pixels never came, and the gateway may have dropped the image."""


CLAIMS = (Until.COMPUTED, Until.STARTED)
"""The pins of a sample whose chunks read the encoder output; a sample has at most one of them."""


class RequestImage:
    """One image of a request. *end* is the index after its last token; *param* names the image in errors.

    *pins* are (index of a sample, until when); EncoderCache sets and removes them. A transition that is not in
    TRANSITIONS raises RuntimeError.
    """

    __slots__ = ("_inline", "_slot", "end", "key", "param", "pins", "state")

    def __init__(self, item: MediaItem, salt: bytes, param: str) -> None:
        self.key = EncoderKey(salt, item.modality, item.content_hash, item.grid, item.original_size)
        self.end = item.spans[-1].start + item.spans[-1].length
        self.param = param
        self.pins: set[tuple[int, Until]] = set()
        self._inline = item.inline
        self._slot = item.slot
        self.state = self._without_output()

    @property
    def has_pixels(self) -> bool:
        """Whether pixels are available to encode the image (again)."""
        return self._inline is not None or self._slot is not None

    def is_claimed(self, sample: int) -> bool:
        """Whether a chunk of *sample* pins the encoder output in order to read it."""
        return any((sample, until) in self.pins for until in CLAIMS)

    def ask(self) -> None:
        """Record that the gateway was asked for the pixels."""
        self._move(State.REQUESTED)

    def bring(self, slot: SlotRef | None, inline: bytes | None) -> None:
        """Store the pixels from the gateway's answer."""
        self._move(State.AT_HAND)
        self._slot, self._inline = slot, inline

    def pin(self, sample: int, until: Until, *, is_encoded: bool) -> None:
        """Record that *sample* needs the encoder output, which a cache holds or is about to hold."""
        if not self.pins:
            self._move(State.ENCODED if is_encoded else State.ENCODING)
        self.pins.add((sample, until))

    def unpin(self, sample: int, untils: Collection[Until]) -> bool:
        """Undo pins of *sample*, if set; return whether the last pin was removed."""
        if not self.pins:
            return False
        self.pins.difference_update((sample, until) for until in untils)
        if self.pins:
            return False
        self._move(self._without_output())
        return True

    def complete(self) -> None:
        self._move(State.ENCODED)

    def abandon(self) -> None:
        """Record that encoding failed, and remove all pins. Sequences that need the image must plan it again."""
        self.pins.clear()
        self._move(self._without_output())

    def read(self, slot_names: list[str]) -> bytes:
        """Return the patches of an image that is AT_HAND, and add the name of a slot that was read to *slot_names*.

        Raises WorkerFailed if the slot cannot be read, or could not be; the image then has no pixels.
        """
        if self._inline is None:
            self._inline = self._copy(slot_names)
        return self._inline

    def _copy(self, slot_names: list[str]) -> bytes:
        slot = self._slot
        if slot is None:
            raise WorkerFailed("The worker does not hold this image, and received no pixels for it.", self.param)
        self._give_up_slot(slot_names)
        try:
            return read_slot(slot)
        except SlotError as error:
            raise WorkerFailed("The image's pixels could not be read from shared memory.", self.param) from error

    def release(self, slot_names: list[str]) -> None:
        """End the image with its request, and add the name of a slot that is still held to *slot_names*."""
        self._move(State.RELEASED)
        self._give_up_slot(slot_names)
        self._inline = None

    def _give_up_slot(self, slot_names: list[str]) -> None:
        if self._slot is not None:
            slot_names.append(self._slot.name)
            self._slot = None

    def _without_output(self) -> State:
        return State.AT_HAND if self.has_pixels else State.EXPECTED

    def _move(self, state: State) -> None:
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"An image that is {self.state.name} cannot become {state.name} ({self.param}).")
        self.state = state
