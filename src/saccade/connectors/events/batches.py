"""vLLM's cache events, which it sends over ZeroMQ in batches, in all four encodings that its releases have used.

A batch is a msgpack array or map, and so is each of its events. Other fields are ignored.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from saccade.transport.message_pack import num_items

SHORT_EVENT_BYTES: Final = 64 << 10
"""Makes few objects, whatever it has."""

MAX_EVENTS, MAX_BLOCKS, MAX_TOKENS = 65_536, 1 << 17, 1 << 20
"""Events of a batch, blocks and tokens of an event: a prompt of a million tokens in blocks of 8."""

CONTAINERS_OF_A_BLOCK: Final = 8
"""Extra keys are a list for each block, and one for each of its images."""

MAX_LOOKAHEAD_BYTES: Final = 64 << 10
EMPTY: Final = msgspec.Raw(b"\x90")
CONTAINERS: Final = bytes((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))
"""What an array or a map of msgpack begins with. Other values may have these bytes, too."""

KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")

Hash = int | bytes
"""An engine's own name of a block. vLLM's is the low 64 bits of its hash, or all 32 bytes, as it was started."""

ExtraKeys = list[Any] | None
"""What one block depends on besides its tokens."""


class Stored(msgspec.Struct, frozen=True, tag="BlockStored"):
    """Blocks became reusable, each the parent of the next; *parent_block_hash* is None if the first has none.

    *token_ids* are those of all blocks. *extra_keys* has an entry per block: None, or a list of those that apply. They
    are, in this order, the LoRA adapter's name, [an image's identifier, its start relative to the block's], the cache
    salt (only in a prompt's first block), and a digest of prompt embeddings. SGLang has *cache_salt* instead. The
    block's hash also depends on the *lookahead_token_ids* after it.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[ExtraKeys] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None
    lookahead_token_ids: Any = None


class Removed(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    """Blocks left the cache."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class Cleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """All blocks left the cache."""


class Unknown(msgspec.Struct, frozen=True):
    """An event of an unknown type."""

    type: str


class _UnknownArray(Unknown, frozen=True, array_like=True):
    """An event as an array, of which only the first value is read."""


class _StoredArray(Stored, frozen=True, array_like=True, tag="BlockStored"):
    """A Stored in the form of releases up to 0.23: the tag, then the fields in order. Older releases have fewer."""


class _RemovedArray(Removed, frozen=True, array_like=True, tag="BlockRemoved"):
    """A Removed in the same form."""


class _ClearedArray(Cleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """A Cleared in the same form: only the tag."""


class _BatchArray(msgspec.Struct, frozen=True, array_like=True):
    """A batch as an array. *ts* is a Unix time.

    A data-parallel rank may follow, but is not read, since every rank publishes at its own endpoint.
    """

    ts: float
    events: msgspec.Raw


class _BatchMap(msgspec.Struct, frozen=True):
    """A batch as a map, as a few releases in between sent it."""

    events: msgspec.Raw


class _Lists(msgspec.Struct):
    """The lists of an event, before they are decoded."""

    block_hashes: msgspec.Raw = EMPTY
    token_ids: msgspec.Raw = EMPTY
    extra_keys: msgspec.Raw = EMPTY
    lookahead_token_ids: msgspec.Raw = EMPTY


class _ListsOfArray(msgspec.Struct, array_like=True):
    """The same lists in an event that is an array."""

    tag: msgspec.Raw
    block_hashes: msgspec.Raw = EMPTY
    parent_block_hash: msgspec.Raw = EMPTY
    token_ids: msgspec.Raw = EMPTY
    block_size: msgspec.Raw = EMPTY
    lora_id: msgspec.Raw = EMPTY
    medium: msgspec.Raw = EMPTY
    lora_name: msgspec.Raw = EMPTY
    extra_keys: msgspec.Raw = EMPTY
    group_idx: msgspec.Raw = EMPTY
    kv_cache_spec_kind: msgspec.Raw = EMPTY
    kv_cache_spec_sliding_window: msgspec.Raw = EMPTY
    locality: msgspec.Raw = EMPTY
    cache_salt: msgspec.Raw = EMPTY
    lookahead_token_ids: msgspec.Raw = EMPTY


Event = Stored | Removed | Cleared | Unknown


class BatchDecoder:
    """Decodes batches. For other bytes, its methods raise one of the errors in saccade.transport.framing.UNREADABLE."""

    def __init__(self) -> None:
        self._batch_array = msgspec.msgpack.Decoder(_BatchArray)
        self._batch_map = msgspec.msgpack.Decoder(_BatchMap)
        self._event_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
        self._event_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared)
        self._events = msgspec.msgpack.Decoder(list[msgspec.Raw])
        self._lists_map = msgspec.msgpack.Decoder(_Lists)
        self._lists_array = msgspec.msgpack.Decoder(_ListsOfArray)
        self._kind_array = msgspec.msgpack.Decoder(_UnknownArray)
        self._kind_map = msgspec.msgpack.Decoder(Unknown)

    def events(self, payload: bytes) -> Iterator[Event]:
        """Yield the events of a batch, each decoded when its turn comes."""
        events = (self._batch_map if _is_map(payload) else self._batch_array).decode(payload).events
        if num_items(memoryview(events)) > MAX_EVENTS:
            raise msgspec.ValidationError("a batch has too many events")
        for event in self._events.decode(events):
            yield self._event(bytes(event))

    def _check_lists(self, encoded: bytes) -> None:
        """Raise ValidationError if the lists of an event are longer than those of any prompt."""
        lists = (self._lists_map if _is_map(encoded) else self._lists_array).decode(encoded)
        num_blocks, extra_keys = num_items(memoryview(lists.block_hashes)), bytes(lists.extra_keys)
        num_containers = len(extra_keys) - len(extra_keys.translate(None, CONTAINERS))
        is_long = num_blocks > MAX_BLOCKS or num_items(memoryview(lists.token_ids)) > MAX_TOKENS
        if is_long or num_containers > CONTAINERS_OF_A_BLOCK * (num_blocks + 1):
            raise msgspec.ValidationError("an event is too long")
        if memoryview(lists.lookahead_token_ids).nbytes > MAX_LOOKAHEAD_BYTES:
            raise msgspec.ValidationError("an event is too long")

    def _event(self, encoded: bytes) -> Event:
        if len(encoded) > SHORT_EVENT_BYTES:
            self._check_lists(encoded)
        try:
            event: Event = (self._event_map if _is_map(encoded) else self._event_array).decode(encoded)
            return event
        except msgspec.ValidationError:
            kind = (self._kind_map if _is_map(encoded) else self._kind_array).decode(encoded).type
            if kind in KNOWN:
                raise
            return Unknown(kind)


def _is_map(encoded: bytes) -> bool:
    return encoded[:1] in (b"\xde", b"\xdf") or b"\x80" <= encoded[:1] <= b"\x8f"
