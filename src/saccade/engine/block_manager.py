"""Blocks, reference counts, prefix cache. No torch.

A sequence's KV state may be of more than one kind. Each kind is a `StateGroup`; the manager asks all of them before it
admits a sequence, and reuses only what every group can resume from.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ordered
from typing import Protocol

import msgspec

from saccade.engine.sequence import Sequence
from saccade.identity.blocks import media_in_block
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, MediaPlace


class StateGroup(Protocol):
    """One kind of KV state, e.g. paged attention blocks, or snapshots of a recurrent state.

    *keys* are block keys from the root on. Nothing here changes a sequence's token counts; the manager does.
    """

    def reusable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        """Return the most blocks, at most *num_blocks*, behind which this group can resume. Changes nothing."""

    def fits(self, keys: Ordered[bytes], num_tokens: int, headroom_blocks: int) -> bool:
        """Whether a sequence of *num_tokens* can be admitted that reuses *keys*. Changes nothing."""

    def admit(self, sequence: Sequence, keys: Ordered[bytes], num_tokens: int) -> None:
        """Take hold of the state behind *keys* and of room for *num_tokens*; `fits` has said yes."""

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take hold of room for *num_tokens*; False, and no change, where there is none."""

    def commit(self, sequence: Sequence, index: int, key: bytes) -> None:
        """The sequence's block *index* is full and computed: what lies there may be reused under *key*."""

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next *num_tokens*, at least 1, to compute at once: fewer where state must be kept."""

    def release(self, sequence: Sequence) -> None:
        """Let go of everything the sequence holds; what was committed stays reusable."""


class _Content(msgspec.Struct, frozen=True, gc=False):
    """What a stored block's key was made of, where that is kept: *token_ids*, packed as int32, and *media*.

    There may be a million of them; Python's collector never looks at one.
    """

    parent: bytes
    token_ids: bytes = b""
    media: tuple[MediaPlace, ...] = ()

    def stored(self, key: bytes) -> BlockStored:
        """Return the event that says so."""
        return BlockStored(key, self.parent, array("i", self.token_ids).tolist(), list(self.media))


class PagedBlocks:
    """Attention state in blocks of a fixed number of tokens; each sequence's block_table names its own.

    A block is referenced by tables, or cached (committed, unreferenced, reusable), or free. Cached blocks are evicted
    least recently used first. Releasing a sequence files its last block first, so a block never outlives its parent
    in the cache. *on_event* hears of every block that becomes reusable or is evicted; what the block holds is told, and
    kept, only with *keep_contents*.
    """

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
        self._contents: dict[bytes, _Content] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence refers to, cached ones included."""
        return len(self._free) + len(self._cached)

    def reusable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        """Return the length of the longest stored prefix of *keys*."""
        for index in range(min(num_blocks, len(keys))):
            if keys[index] not in self._block_of:
                return index
        return min(num_blocks, len(keys))

    def fits(self, keys: Ordered[bytes], num_tokens: int, headroom_blocks: int) -> bool:
        """Whether enough blocks are free beside those that *keys* name."""
        revived = sum(self._block_of[key] in self._cached for key in keys)
        return self._blocks_for(num_tokens) - len(keys) + headroom_blocks <= self.num_free_blocks - revived

    def admit(self, sequence: Sequence, keys: Ordered[bytes], num_tokens: int) -> None:
        """Refer to the blocks behind *keys* and take new ones for the rest."""
        for key in keys:
            block = self._block_of[key]
            self._cached.pop(block, None)
            self.references[block] += 1
            sequence.block_table.append(block)
        self.extend(sequence, num_tokens)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Take new blocks until the table holds *num_tokens*."""
        missing = self._blocks_for(num_tokens) - len(sequence.block_table)
        if missing > self.num_free_blocks:
            return False
        for _ in range(missing):
            sequence.block_table.append(self._take())
        return True

    def commit(self, sequence: Sequence, index: int, key: bytes) -> None:
        """File the block under *key*. Where another block already holds the same content, the table takes that one."""
        block = sequence.block_table[index]
        stored = self._block_of.setdefault(key, block)
        if stored == block:
            if block not in self._key_of:
                self._store(sequence, index, key)
            return
        # Two sequences computed the same content at once. Keeping one copy keeps parents alive as long as children.
        self._cached.pop(stored, None)
        self.references[stored] += 1
        sequence.block_table[index] = stored
        self._let_go(block)

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return *num_tokens*: blocks are kept wherever a chunk ends."""
        return num_tokens

    def release(self, sequence: Sequence) -> None:
        """Let go of the sequence's blocks, last one first."""
        for block in reversed(sequence.block_table):
            self._let_go(block)
        sequence.block_table = array("q")

    def snapshot(self) -> Iterator[BlockStored]:
        """Return every block that is reusable now, parents before children; what changes later is not seen."""
        contents = list(self._contents.items())
        return (content.stored(key) for key, content in contents)

    def clear(self) -> None:
        """Forget every block that no sequence refers to."""
        while self._cached:
            self._evict()

    def _store(self, sequence: Sequence, index: int, key: bytes) -> None:
        """Note what block *index* of *sequence*, new under *key*, holds."""
        content = self._content(sequence, index)
        self._key_of[sequence.block_table[index]] = key
        self._contents[key] = content
        if self.on_event is not None:
            self.on_event(content.stored(key))

    def _content(self, sequence: Sequence, index: int) -> _Content:
        parent = sequence.parent_key(index)
        if not self._keep_contents:
            return _Content(parent)
        start, stop = index * self.block_size, (index + 1) * self.block_size
        runs = [run for run, _ in sequence.media_between(start, stop)] if sequence.runs else ()
        places = tuple(MediaPlace(*overlap) for overlap in media_in_block(runs, start, stop))
        return _Content(parent, array("i", sequence.token_ids[start:stop]).tobytes(), places)

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
            self.on_event(BlockRemoved(key))

    def _let_go(self, block: int) -> None:
        self.references[block] -= 1
        if self.references[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                # Taken again first: memory that was never used need not be touched while this lasts.
                self._free.appendleft(block)


class BlockManager:
    """Admits sequences, grows them, and remembers what they computed, over all groups of state."""

    def __init__(self, groups: Ordered[StateGroup], block_size: int, enable_prefix_caching: bool = True) -> None:
        self.groups = groups
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def paged_blocks(self) -> PagedBlocks:
        """The group of attention state."""
        return next(group for group in self.groups if isinstance(group, PagedBlocks))

    def admit(self, sequence: Sequence, headroom_blocks: int) -> bool:
        """Give *sequence* all state its known tokens need, reusing what every group can resume from.

        Sets num_computed_tokens. At least the last token is left to compute, since its logits are needed.
        False, and no change, where a group lacks room, *headroom_blocks* for those already running included.
        """
        keys = self._reusable_keys(sequence)
        num_tokens = sequence.num_tokens
        if not all(group.fits(keys, num_tokens, headroom_blocks) for group in self.groups):
            return False
        for group in self.groups:
            group.admit(sequence, keys, num_tokens)
        sequence.num_computed_tokens = len(keys) * self.block_size
        return True

    def num_missing_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens are left to compute; of a sequence that waits, if it were admitted now."""
        if sequence.block_table:
            return sequence.num_pending_tokens
        return sequence.num_tokens - len(self._reusable_keys(sequence)) * self.block_size

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next *num_tokens* to compute at once, by the group that wants to stop first."""
        return min(group.chunk(sequence, num_tokens) for group in self.groups)

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        if not (self.enable_prefix_caching and sequence.reads_prefix_cache):
            return []
        limit = (sequence.num_tokens - 1) // self.block_size
        keys = sequence.block_keys(limit, self.block_size)
        previous = -1
        # A group may resume only at some boundaries, so a shorter prefix is put to all of them again.
        while limit != previous:
            previous = limit
            for group in self.groups:
                limit = group.reusable(keys, limit)
        return keys[:limit]

    def extend(self, sequence: Sequence) -> bool:
        """Make room for all known tokens of *sequence*; False where a group has none."""
        return all(group.extend(sequence, sequence.num_tokens) for group in self.groups)

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Move *sequence* on to *num_computed_tokens* and make the blocks that became full reusable."""
        first, last = (count // self.block_size for count in (sequence.num_computed_tokens, num_computed_tokens))
        sequence.num_computed_tokens = num_computed_tokens
        if not self.enable_prefix_caching or first == last:
            return
        keys = sequence.block_keys(last, self.block_size)
        for index in range(first, last):
            for group in self.groups:
                group.commit(sequence, index, keys[index])

    def release(self, sequence: Sequence) -> None:
        """Let go of all state of *sequence*, in every group."""
        for group in self.groups:
            group.release(sequence)
        sequence.num_computed_tokens = 0
