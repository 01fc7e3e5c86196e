"""The plan of one step. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from saccade.engine.core.images import EncoderKey, RequestImage
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import KvReceive, KvSend
from saccade.errors import SaccadeError

Fail = Callable[[Sequence, SaccadeError], object]
"""Ends the request of a sequence, and removes it from the step."""


@dataclass(slots=True)
class Schedule:
    """The work of one step: the number of tokens of each sequence, and the images that must be encoded before them.

    *encode* maps a key to the step's sequences that bring or need that image, in order of arrival. Images of
    *background* are encoded while this step and later ones run, and no chunk of this step extends past the start of
    such an image. *missing_images* maps parked sequences to the indices of the images whose pixels they lack.
    *admitted* sequences have room for the state that a prefill worker sends; each maps to its number of cached blocks.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    encode: dict[EncoderKey, list[tuple[Sequence, RequestImage]]] = field(default_factory=dict)
    background: set[EncoderKey] = field(default_factory=set)
    missing_images: dict[Sequence, list[int]] = field(default_factory=dict)
    admitted: dict[Sequence, int] = field(default_factory=dict)
    receive: list[KvReceive] = field(default_factory=list)
    send: list[KvSend] = field(default_factory=list)

    @property
    def encoded_within(self) -> list[EncoderKey]:
        """The images that are encoded within the step."""
        return [key for key in self.encode if key not in self.background]


@dataclass(slots=True)
class RemainingBudget:
    """The rest of the budgets of the step being planned."""

    tokens: int
    patches: int
