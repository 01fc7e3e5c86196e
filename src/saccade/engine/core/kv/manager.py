"""Manage a sequence's KV state, of every kind that the model has. No torch.

Each kind is a `StateGroup`: paged attention blocks (PagedBlocks, for keys and values and for latents), and state
checkpoints (StateCheckpoints, for recurrent states). The manager checks all groups before it admits a sequence, and
reuses only the prefix from which every group can resume.
"""

from collections.abc import Sequence as Ordered
from typing import Protocol

from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.sequence import Sequence


class StateGroup(Protocol):
    """One kind of KV state, such as paged attention blocks, or checkpoints of a recurrent state.

    *keys* are block keys from the root on. A group never changes a sequence's token counts; the manager does.
    """

    def reusable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        """Return the number of blocks, at most *num_blocks*, after which this group can resume. Changes nothing."""

    def fits(self, keys: Ordered[bytes], num_tokens: int, headroom_blocks: int) -> bool:
        """Whether a sequence of *num_tokens* that reuses *keys* can be admitted. Changes nothing."""

    def admit(self, sequence: Sequence, keys: Ordered[bytes], num_tokens: int) -> None:
        """Reserve the state of *keys* and room for *num_tokens*. `fits` must have returned True."""

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve room for *num_tokens*; return False, without a change, if there is none."""

    def commit(self, sequence: Sequence, index: int, key: bytes) -> None:
        """Make the state of block *index*, which is full and computed, reusable under *key*."""

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next *num_tokens* to compute at once; fewer to keep a state.

        0 if the key of that state needs a token that a step in flight draws.
        """

    def release(self, sequence: Sequence) -> None:
        """Release all state of the sequence; committed state stays reusable."""

    def clear(self) -> None:
        """Drop the reusable state that no sequence needs."""


class BlockManager:
    """Admits sequences, extends them, and keeps their computed state, over all groups."""

    def __init__(self, groups: Ordered[StateGroup], block_size: int, enable_prefix_caching: bool = True) -> None:
        self.groups = groups
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching

    @property
    def paged_blocks(self) -> PagedBlocks:
        """The group of attention state."""
        return next(group for group in self.groups if isinstance(group, PagedBlocks))

    @property
    def checkpoints(self) -> StateCheckpoints | None:
        """The group of recurrent state; None if the model has none."""
        return next((group for group in self.groups if isinstance(group, StateCheckpoints)), None)

    def admit(self, sequence: Sequence, headroom_blocks: int) -> bool:
        """Reserve all state for the known tokens of *sequence*, reusing what every group can resume from.

        Sets num_computed_tokens. At least the last token is left to compute, since its logits are needed. Returns
        False, without a change, if a group lacks room; *headroom_blocks* stay free for the running sequences.
        """
        keys = self._reusable_keys(sequence)
        num_tokens = sequence.num_tokens
        if not all(group.fits(keys, num_tokens, headroom_blocks) for group in self.groups):
            return False
        for group in self.groups:
            group.admit(sequence, keys, num_tokens)
        sequence.num_computed_tokens = sequence.num_launched_tokens = len(keys) * self.block_size
        return True

    def reserve(self, samples: Ordered[Sequence], headroom_blocks: int) -> int | None:
        """Reserve blocks for the prompts of all *samples* of a request, whose state will be received; they share them.

        Each sample has its own block for the tokens after the last full block. Returns how many leading blocks are
        cached already; None, without a change, if there is no room.
        """
        first, paged = samples[0], self.paged_blocks
        num_full = first.num_tokens // self.block_size
        keys = first.block_keys(num_full, self.block_size) if self.enable_prefix_caching else []
        cached_keys = keys[: paged.reusable(keys, len(keys))]
        num_own = (len(samples) - 1) * (first.num_tokens % self.block_size > 0)
        if not paged.fits(cached_keys, first.num_tokens, headroom_blocks + num_own):
            return None
        paged.admit(first, cached_keys, first.num_tokens)
        for sample in samples[1:]:
            paged.share(first, sample, num_full)
            paged.extend(sample, first.num_tokens)
        return len(cached_keys)

    def num_sample_blocks(self, num_tokens: int) -> int:
        """Return the most blocks that another sample of a prompt of *num_tokens* takes while the first holds its
        blocks.

        It shares the full blocks, unless it may have to compute the prompt again: without a prefix cache, or if the
        state checkpoint is gone that it would resume from.
        """
        shares = self.enable_prefix_caching and self.checkpoints is None
        return 1 if shares else -(-num_tokens // self.block_size)

    def num_missing_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens left to compute; for a waiting sequence, the number if it were admitted now."""
        if sequence.block_table:
            return sequence.num_pending_tokens
        return sequence.num_tokens - len(self._reusable_keys(sequence)) * self.block_size

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next *num_tokens* to compute at once: the minimum over the groups."""
        return min(group.chunk(sequence, num_tokens) for group in self.groups)

    def _reusable_keys(self, sequence: Sequence) -> list[bytes]:
        if not (self.enable_prefix_caching and sequence.reads_prefix_cache):
            return []
        limit = (sequence.num_tokens - 1) // self.block_size
        keys = sequence.block_keys(limit, self.block_size)
        previous = -1
        # Some groups can resume only at certain boundaries, so a shorter prefix is checked with all groups again.
        while limit != previous:
            previous = limit
            for group in self.groups:
                limit = group.reusable(keys, limit)
        return keys[:limit]

    def extend(self, sequence: Sequence) -> bool:
        """Reserve room for all expected tokens of *sequence*; return False if a group has none."""
        return all(group.extend(sequence, sequence.num_expected_tokens) for group in self.groups)

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Set the computed tokens of *sequence*, and make the blocks that became full reusable."""
        first, last = (count // self.block_size for count in (sequence.num_computed_tokens, num_computed_tokens))
        sequence.num_computed_tokens = num_computed_tokens
        sequence.num_launched_tokens = max(sequence.num_launched_tokens, num_computed_tokens)
        if not self.enable_prefix_caching or first == last:
            return
        keys = sequence.block_keys(last, self.block_size)
        for index in range(first, last):
            for group in self.groups:
                group.commit(sequence, index, keys[index])

    def release(self, sequence: Sequence) -> None:
        for group in self.groups:
            group.release(sequence)
        sequence.num_computed_tokens = sequence.num_launched_tokens = 0

    def clear(self) -> None:
        """Drop the state that no sequence needs, in every group."""
        for group in self.groups:
            group.clear()
