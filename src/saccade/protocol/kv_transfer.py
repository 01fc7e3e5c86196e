"""KV transfers from a prefill worker to a decode worker: the fields of requests, and the messages between the workers.

The gateway makes a *key* of 32 random bytes for every transfer and hands it to both workers with their requests. The
decode worker connects to the prefill worker. Both prove that they know the key, and every message has an authentication
code that is computed from it (saccade.transport.kv_transfer).
"""

import secrets

import msgspec

from saccade.protocol.media import SlotRef
from saccade.protocol.output import TokenLogprob

KEY_BYTES = 32


def new_key() -> bytes:
    """Return the key of a new transfer, KEY_BYTES random bytes."""
    return secrets.token_bytes(KEY_BYTES)


class SendKv(msgspec.Struct, frozen=True, array_like=True, tag="send"):
    """Compute the request up to its first tokens, then keep its state until a decode worker has received it."""

    key: bytes


class ReceiveKv(msgspec.Struct, frozen=True, array_like=True, tag="receive"):
    """Receive the state of the request's prompt, and its first tokens, from the worker at *source*, host:port."""

    key: bytes
    source: str


class KvForm(msgspec.Struct, frozen=True, array_like=True):
    """The model and its cache layout, which must be equal at both ends.

    A block takes *window_nbytes* more in sliding-window layers, for which only the end of a prompt is sent.
    """

    fingerprint: bytes
    dtype: str
    kv_cache_dtype: str
    block_size: int
    block_nbytes: int
    state_nbytes: int
    tensor_parallel_size: int = 1
    window_nbytes: int = 0

    def piece_nbytes(self, piece: "Piece") -> int:
        """Return the size of *piece*'s content in bytes."""
        if piece.is_state:
            return self.state_nbytes
        num_bytes = self.block_nbytes + (self.window_nbytes if piece.has_window else 0)
        return (piece.stop - piece.start) * num_bytes


class Pull(msgspec.Struct, frozen=True, array_like=True, tag="pull"):
    """The decode worker asks for the prompt's blocks, starting at *first_block*, and the recurrent states.

    It has reserved room for them, and holds the blocks before them. *shm_namespace* is its Description's.
    """

    first_block: int
    form: KvForm
    shm_namespace: str


class Waiting(msgspec.Struct, frozen=True, array_like=True, tag="waiting"):
    """The prompt has not been computed yet."""


class PullRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """There will be no transfer; *message* is for the operator."""

    message: str


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The first token of one sample, with its log probability if the request asks for it."""

    token_id: int
    logprob: TokenLogprob | None = None


class Prefilled(msgspec.Struct, frozen=True, array_like=True, tag="prefilled"):
    """The prompt has been computed. *first* has an entry for each sample of the request, in order."""

    first: list[FirstToken]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = []


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """Blocks [start, stop) of the prompt, or with *is_state* the recurrent states at its end.

    With *has_window*, the content also has the same blocks of the sliding-window layers. The content follows the
    message, or is in the shared-memory *slot*.
    """

    start: int
    stop: int
    is_state: bool = False
    slot: SlotRef | None = None
    has_window: bool = False


class PieceAck(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The decode worker has used a piece, so another may follow."""


class StateAck(msgspec.Struct, frozen=True, array_like=True, tag="received"):
    """The decode worker has the whole state, so the prefill worker need not keep it."""


FromSource = Waiting | PullRefused | Prefilled | Piece
"""From the prefill worker."""

FromDestination = Pull | PieceAck | StateAck
"""From the decode worker; the first message is a Pull."""
