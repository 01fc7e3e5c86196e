"""Manages attention state in paged blocks, with reference counts and a prefix cache. Does not import torch."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Ordered

import msgspec

from saccade.engine.core.sequence import ALL, BlockTable, Sequence
from saccade.identity.blocks import media_in_block
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, MediaPlace, StateRemoved


class StoredContent(msgspec.Struct, frozen=True, gc=False):
    """A stored block's contents, if contents are kept: *token_ids*, packed as int32, and *media*.

    There may be a million of these objects, so the garbage collector does not track them.
    """

    parent: bytes
    token_ids: bytes = b""
    media: tuple[MediaPlace, ...] = ()
    is_first: bool = False


class PagedBlocks:
    """Attention state in blocks with a fixed number of tokens; each sequence's table lists its blocks.

    All layers of a *group* use the same blocks. A block is referenced by tables, cached (committed, unreferenced,
    reusable), or free. Cached blocks are evicted least recently used first. A released sequence caches its last block
    first, so no block outlives its parent in the cache. *on_event* is called for every block that becomes reusable or
    is evicted; the contents of blocks are kept and reported only with *keep_contents*.
    """

    group = ALL
    removed: type[BlockRemoved | StateRemoved] = BlockRemoved

    def __init__(self, num_blocks: int, block_size: int, *, keep_contents: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.references = [0] * num_blocks
        self.num_evicted = 0
        self.on_event: Callable[[KvEvent], None] | None = None
        self._free = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._keep_contents = keep_contents
        self._contents: dict[bytes, StoredContent] = {}

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence references, including cached ones."""
        return len(self._free) + len(self._cached)

    def reusable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        """Return the length of the longest stored prefix of *keys*, at most *num_blocks*."""
        for index in range(min(num_blocks, len(keys))):
            if keys[index] not in self._block_of:
                return index
        return min(num_blocks, len(keys))

    def num_missing(self, sequence: Sequence) -> int:
        """Return how many blocks a running sequence's table lacks for its next token; negative if some are spare."""
        return self._blocks_for(sequence.num_expected_tokens) - len(sequence.tables[self.group].blocks)

    def fits(self, keys: Ordered[bytes], num_tokens: int, headroom_blocks: int) -> bool:
        """Whether enough blocks are free for *num_tokens*, besides the blocks with *keys*."""
        revived = sum(self._block_of[key] in self._cached for key in keys)
        return self._blocks_for(num_tokens) - len(keys) + headroom_blocks <= self.num_free_blocks - revived

    def admit(self, sequence: Sequence, keys: Ordered[bytes], num_tokens: int) -> None:
        """Reference the blocks with *keys*, and allocate new blocks for the rest."""
        table = sequence.tables[self.group].blocks
        for key in keys:
            block = self._block_of[key]
            self._cached.pop(block, None)
            self.references[block] += 1
            table.append(block)
        self.extend(sequence, num_tokens)

    def share(self, sequence: Sequence, other: Sequence, num_blocks: int) -> None:
        """Reference the first *num_blocks* blocks of *sequence* in the table of *other*, which is empty."""
        table, others = sequence.tables[self.group], other.tables[self.group]
        for block in table.blocks[table.num_passed : num_blocks]:
            self.references[block] += 1
        others.blocks, others.num_passed = table.blocks[:num_blocks], table.num_passed

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks until the table holds *num_tokens*. If too few are free, change nothing and return False."""
        table = sequence.tables[self.group].blocks
        num_missing = self._blocks_for(num_tokens) - len(table)
        # Most steps of a decode need no block, and ask no further.
        if num_missing > 0 and num_missing > self.num_free_blocks:
            return False
        for _ in range(num_missing):
            table.append(self._take())
        return True

    def commit(self, sequence: Sequence, index: int, key: bytes) -> None:
        """Store the block under *key*. If another block has the same content, the table references that one instead."""
        table = sequence.tables[self.group]
        block = table.blocks[index]
        existing_block = self._block_of.setdefault(key, block)
        if existing_block == block:
            if block not in self._key_of:
                self._store(sequence, index, key)
            return
        # Two sequences computed the same content at once. A single copy ensures that parents live as long as their
        # children.
        self._cached.pop(existing_block, None)
        self.references[existing_block] += 1
        table.blocks[index] = existing_block
        table.replaced.append(index)
        self._let_go(block)

    def forget_blocks(self, keys: Collection[bytes]) -> tuple[set[bytes], set[int]]:
        """Stop the reuse of the blocks with *keys* and of all their descendants. Return their keys and blocks.

        Sequences that reference these blocks keep them. The returned keys include those of *keys* that are not stored.
        """
        all_keys = set(keys)
        for key, content in self._contents.items():  # parents before their children
            if content.parent in all_keys:
                all_keys.add(key)
        blocks = set[int]()
        for key in all_keys & self._block_of.keys():
            blocks.add(block := self._block_of.pop(key))
            del self._key_of[block], self._contents[key]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)
            if self.on_event is not None:
                self.on_event(self.removed(key))
        return all_keys, blocks

    def release_sequence(self, sequence: Sequence) -> None:
        table = sequence.tables[self.group]
        for block in reversed(table.blocks[table.num_passed :]):
            self._let_go(block)
        sequence.tables[self.group] = BlockTable()

    def snapshot(self) -> Iterator[KvEvent]:
        """Return every block that is reusable now, parents before children; later changes are not included."""
        contents = list(self._contents.items())
        return (self._stored_event(key, content) for key, content in contents)

    def clear(self) -> None:
        """Drop every block that no sequence references."""
        while self._cached:
            self._evict()

    def _store(self, sequence: Sequence, index: int, key: bytes) -> None:
        """Record under the new *key* what block *index* of *sequence* contains."""
        content = self._content(sequence, index)
        self._key_of[sequence.tables[self.group].blocks[index]] = key
        self._contents[key] = content
        if self.on_event is not None:
            self.on_event(self._stored_event(key, content))

    def _stored_event(self, key: bytes, content: StoredContent) -> KvEvent:
        """Return the event which says that a block with *content* became reusable under *key*."""
        token_ids = array("i", content.token_ids).tolist()
        return BlockStored(key, content.parent, token_ids, list(content.media), content.is_first)

    def _content(self, sequence: Sequence, index: int) -> StoredContent:
        parent = sequence.parent_key(index)
        if not self._keep_contents:
            return StoredContent(parent, is_first=index == 0)
        start, stop = index * self.block_size, (index + 1) * self.block_size
        runs = [run for run, _ in sequence.media_between(start, stop)] if sequence.runs else ()
        places = tuple(MediaPlace(*overlap) for overlap in media_in_block(runs, start, stop))
        token_ids = array("i", sequence.token_ids[start:stop]).tobytes()
        return StoredContent(parent, token_ids, places, is_first=index == 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _take(self) -> int:
        if not self._free:
            self._evict()
        block = self._free.popleft()
        self.references[block] = 1
        return block

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        self.num_evicted += 1
        key = self._key_of.pop(block)
        del self._block_of[key], self._contents[key]
        self._free.append(block)
        if self.on_event is not None:
            self.on_event(self.removed(key))

    def _let_go(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                # This block is allocated again first, so that memory that was never used stays untouched as long as
                # possible.
                self._free.appendleft(block)
