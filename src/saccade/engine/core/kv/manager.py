"""Manage a sequence's KV state, of both kinds that a model may have. No torch.

Attention state is in paged blocks, keys and values or latents; recurrent state is kept in checkpoints. Only the prefix
from which both can resume is reused.
"""

from collections.abc import Sequence as Ordered

from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.sequence import Sequence


class BlockManager:
    """Admits sequences, extends them, and keeps their computed state. Most models have no *checkpoints*."""

    def __init__(
        self, paged_blocks: PagedBlocks, checkpoints: StateCheckpoints | None = None, enable_prefix_caching: bool = True
    ) -> None:
        self.paged_blocks = paged_blocks
        self.checkpoints = checkpoints
        self.block_size = paged_blocks.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stateless_tokens_total = 0
        """Prompt tokens in cached blocks that are computed again, because no state was kept after them."""

    def admit(self, sequence: Sequence, headroom_blocks: int) -> bool:
        """Reserve all state for the known tokens of *sequence*, reusing what it can resume from.

        Sets num_computed_tokens. At least the last token is left to compute, since its logits are needed. Returns
        False, without a change, if there is no room; *headroom_blocks* stay free for the running sequences.
        """
        keys, num_stateless = self._reusable_keys(sequence)
        if not self.paged_blocks.fits(keys, sequence.num_tokens, headroom_blocks):
            return False
        self.paged_blocks.admit(sequence, keys, sequence.num_tokens)
        if self.checkpoints is not None and keys:
            self.checkpoints.admit(sequence, keys[-1])
        if sequence.num_cached_tokens is None:
            self.stateless_tokens_total += num_stateless * self.block_size
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
        return sequence.num_tokens - len(self._reusable_keys(sequence)[0]) * self.block_size

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next *num_tokens* to compute at once; fewer to keep a recurrent state."""
        return num_tokens if self.checkpoints is None else self.checkpoints.chunk(sequence, num_tokens)

    def _reusable_keys(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Return the keys of the blocks to resume from, and how many more are cached without a state after them."""
        if not (self.enable_prefix_caching and sequence.reads_prefix_cache):
            return [], 0
        limit = (sequence.num_tokens - 1) // self.block_size
        keys = sequence.block_keys(limit, self.block_size)
        limit = self.paged_blocks.reusable(keys, limit)
        length = limit if self.checkpoints is None else self.checkpoints.reusable(keys, limit)
        return keys[:length], limit - length

    def extend(self, sequence: Sequence, num_proposed: int = 0) -> bool:
        """Reserve room for all expected tokens of *sequence* and *num_proposed*; return False if there is none."""
        return self.paged_blocks.extend(sequence, sequence.num_expected_tokens + num_proposed)

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Set the computed tokens of *sequence*, and make the blocks that became full reusable."""
        first, last = (count // self.block_size for count in (sequence.num_computed_tokens, num_computed_tokens))
        sequence.num_computed_tokens = num_computed_tokens
        sequence.num_launched_tokens = max(sequence.num_launched_tokens, num_computed_tokens)
        if not self.enable_prefix_caching or first == last:
            return
        keys = sequence.block_keys(last, self.block_size)
        for index in range(first, last):
            self.paged_blocks.commit(sequence, index, keys[index])
            if self.checkpoints is not None:
                self.checkpoints.commit(sequence, keys[index])

    def release(self, sequence: Sequence) -> None:
        """Release all state of *sequence*; committed state stays reusable."""
        self.paged_blocks.release(sequence)
        if self.checkpoints is not None:
            self.checkpoints.release(sequence)
        sequence.num_computed_tokens = sequence.num_launched_tokens = 0

    def clear(self) -> None:
        """Drop the reusable state that no sequence needs."""
        self.paged_blocks.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()
