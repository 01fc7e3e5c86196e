"""The plan of one step. No torch."""

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


@dataclass(slots=True)
class Schedule:
    """The work of one step: the number of tokens of each sequence, and the pixels of images to encode before them.

    A sequence with *proposals* computes its last token and these. *lacking* maps parked sequences to the indices of the
    images whose pixels they lack. *unreadable* maps sequences to an image whose pixels could not be read, and why: they
    fail if no other sequence brings it. *admitted* sequences have room for the state that a prefill worker sends; each
    maps to its number of cached blocks. While it is planned, *tokens* and *patches* are the rest of the step's budgets.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    encode: dict[EncoderKey, bytes] = field(default_factory=dict)
    lacking: dict[Sequence, list[int]] = field(default_factory=dict)
    unreadable: dict[Sequence, tuple[EncoderKey, SaccadeError]] = field(default_factory=dict)
    admitted: dict[Sequence, int] = field(default_factory=dict)
    proposals: dict[Sequence, Proposal] = field(default_factory=dict)
    tokens: int = 0
    patches: int = 0


class KvCopies(NamedTuple):
    """The state that a step receives from other engines, and copies for them."""

    receive: tuple[KvReceive, ...] = ()
    send: tuple[KvSend, ...] = ()


NO_COPIES = KvCopies()
