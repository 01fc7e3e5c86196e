"""Converts the engine's cache events to TokenSpeed's, in which every token of an image has the image's pad value."""

import time
from collections.abc import Iterator

from smg_grpc_proto.generated import common_pb2

from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvents
from saccade.worker.tokenspeed.images import pad_value

DP_RANK = 0
HASH_BYTES = 8


class EventSubscription:
    """One gateway's subscription to cache events.

    Send opening(), then batch() for every message of the engine's feed, beginning with the snapshot. Only blocks that
    descend from *root* are reported, since requests of this wire cannot use the blocks of other wires and tenants.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._keys: set[bytes] = set()
        self._number = 0
        self._event_id = 0

    def opening(self) -> common_pb2.KvEventBatch:
        """Return the first batch, number 0, which makes the subscriber forget what it knows about this worker."""
        return self._numbered([common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())])

    def batch(self, message: KvEvents) -> common_pb2.KvEventBatch | None:
        """Return *message* as the subscription's next batch; None if it has no event for this subscription."""
        events = list(self._events(message))
        if not events:
            return None
        self._number += 1
        return self._numbered(events)

    def _numbered(self, events: list[common_pb2.KvCacheEvent]) -> common_pb2.KvEventBatch:
        for event in events:
            self._event_id += 1
            event.event_id = self._event_id
        return common_pb2.KvEventBatch(
            sequence_number=self._number, timestamp=time.time(), events=events, dp_rank=DP_RANK
        )

    def _events(self, message: KvEvents) -> Iterator[common_pb2.KvCacheEvent]:
        """Yield an event for each chain of stored blocks and each run of removed ones."""
        chain: list[BlockStored] = []
        removed: list[bytes] = []
        for event in message.events:
            match event:
                case BlockStored() if event.parent == self._root or event.parent in self._keys:
                    if removed or (chain and chain[-1].key != event.parent):
                        yield from self._flushed(chain, removed)
                    self._keys.add(event.key)
                    chain.append(event)
                case BlockRemoved(key) if key in self._keys:
                    if chain:
                        yield from self._flushed(chain, removed)
                    self._keys.discard(key)
                    removed.append(key)
        yield from self._flushed(chain, removed)

    def _flushed(self, chain: list[BlockStored], removed: list[bytes]) -> Iterator[common_pb2.KvCacheEvent]:
        if chain:
            yield self._stored_event(chain)
        if removed:
            hashes = [_hash(key) for key in removed]
            yield common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=hashes))
        chain.clear()
        removed.clear()

    def _stored_event(self, chain: list[BlockStored]) -> common_pb2.KvCacheEvent:
        blocks = common_pb2.KvBlocksStored(blocks=[self._block(block) for block in chain])
        if chain[0].parent != self._root:
            blocks.parent_block_hash = _hash(chain[0].parent)
        return common_pb2.KvCacheEvent(stored=blocks)

    def _block(self, block: BlockStored) -> common_pb2.KvBlock:
        token_ids = list(block.token_ids)
        for place in block.media:
            pad = pad_value(place.content_hash)
            token_ids[place.start : place.start + place.length] = [pad] * place.length
        return common_pb2.KvBlock(block_hash=_hash(block.key), token_ids=token_ids, block_size=self._block_size)


def _hash(key: bytes) -> int:
    """Return the low 64 bits of a key as a signed number."""
    return int.from_bytes(key[-HASH_BYTES:], "big", signed=True)
