"""The events that tell the engine what happens to transfers."""

from collections.abc import Callable
from typing import NamedTuple

from saccade.errors import PeerFailed, WorkerFailed
from saccade.protocol.kv_transfer import Piece, Prefilled


class StateRequested(NamedTuple):
    """A decode worker has reserved room for the state, and requests it from block *first_block* on."""

    key: bytes
    first_block: int


class PieceTaken(NamedTuple):
    """The decode worker has used a piece that was sent."""

    key: bytes


class Delivered(NamedTuple):
    """The decode worker has received the whole state."""

    key: bytes


class PromptComputed(NamedTuple):
    """The prefill worker has computed the prompt; its state follows."""

    key: bytes
    prefilled: Prefilled


class PieceArrived(NamedTuple):
    """A part of the state has arrived. Its content has the size that its piece must have."""

    key: bytes
    piece: Piece
    content: bytes


class TransferEnded(NamedTuple):
    """The transfer failed; *reason* is a sentence for the operator and the client.

    *by_peer* says whether the other end is at fault.
    """

    key: bytes
    reason: str
    by_peer: bool = True

    @property
    def error(self) -> WorkerFailed:
        return PeerFailed(self.reason) if self.by_peer else WorkerFailed(self.reason)


Event = StateRequested | PieceTaken | Delivered | PromptComputed | PieceArrived | TransferEnded
Tell = Callable[[Event], None]
