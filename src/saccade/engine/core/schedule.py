"""The plan of one step, finished and in the making. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from saccade.engine.core.images import EncoderKey
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Proposal
from saccade.engine.core.step import KvReceive, KvSend
from saccade.errors import SaccadeError


@dataclass(frozen=True)
class Budgets:
    """The limits of one step, and of waiting sequences.

    With *whole_images* no chunk ends inside an image, whose tokens see each other: it ends before the image. A chunk
    that begins with one holds all of it, beyond the step's budget if necessary, or it would wait for ever.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    encode_budget_patches: int
    max_num_waiting: int = 1024
    whole_images: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """The work of one step: the number of tokens of each sequence, and the pixels of images to encode before them.

    A sequence with *proposals* computes its last token and these. *lacking* maps parked sequences to the
    indices of the images whose pixels they lack. *unreadable* are sequences that fail: the pixels of an image could not
    be read. *admitted* sequences have room for the state that a prefill worker sends; each maps to its number of cached
    blocks.
    """

    chunks: Mapping[Sequence, int]
    encode: Mapping[EncoderKey, bytes] = field(default_factory=dict)
    lacking: Mapping[Sequence, list[int]] = field(default_factory=dict)
    unreadable: Mapping[Sequence, SaccadeError] = field(default_factory=dict)
    admitted: Mapping[Sequence, int] = field(default_factory=dict)
    proposals: Mapping[Sequence, Proposal] = field(default_factory=dict)


class KvCopies(NamedTuple):
    """The state that a step receives from other engines, and copies for them."""

    receive: tuple[KvReceive, ...] = ()
    send: tuple[KvSend, ...] = ()


NO_COPIES = KvCopies()


@dataclass(slots=True)
class ScheduleBuilder:
    """A Schedule in the making, and the rest of its budgets for *tokens* and *patches*."""

    tokens: int
    patches: int = 0
    chunks: dict[Sequence, int] = field(default_factory=dict)
    encode: dict[EncoderKey, bytes] = field(default_factory=dict)
    lacking: dict[Sequence, list[int]] = field(default_factory=dict)
    unreadable: dict[Sequence, tuple[EncoderKey, SaccadeError]] = field(default_factory=dict)
    admitted: dict[Sequence, int] = field(default_factory=dict)
    proposals: dict[Sequence, Proposal] = field(default_factory=dict)

    def finish(self) -> Schedule:
        """Return the schedule. An image that one sequence cannot read is no fault if another one brings it."""
        unreadable = {one: error for one, (key, error) in self.unreadable.items() if key not in self.encode}
        return Schedule(self.chunks, self.encode, self.lacking, unreadable, self.admitted, self.proposals)
