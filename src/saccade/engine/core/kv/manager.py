"""Manages every kind of KV state that a sequence has. Does not import torch.

Attention state, which is keys and values or latents, is in paged blocks; sliding-window layers have a separate group.
Recurrent state is kept in checkpoints. A prefix is reused only if every kind of state can resume from it.
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.kv.window_blocks import WindowBlocks
from saccade.engine.core.sequence import WINDOW, Sequence


@dataclass(eq=False)
class BlockManager:
    """Admits sequences, extends them, and keeps their computed state.

    Most models have neither *checkpoints* nor *window_blocks*, and none has both.
    """

    paged_blocks: PagedBlocks
    checkpoints: StateCheckpoints | None = None
    enable_prefix_caching: bool = True
    window_blocks: WindowBlocks | None = None
    stateless_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens in cached blocks that are computed again, by the field of Load that names the cause."""

    def __post_init__(self) -> None:
        self.block_size = self.paged_blocks.block_size
        self._groups = (self.paged_blocks,) if self.window_blocks is None else (self.paged_blocks, self.window_blocks)

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no sequence references; fewer if the window group has a smaller share free."""
        paged, window = self.paged_blocks, self.window_blocks
        if window is None:
            return paged.num_free_blocks
        return min(paged.num_free_blocks, paged.num_blocks * window.num_free_blocks // window.num_blocks)

    def admit(self, sequence: Sequence, headroom_blocks: int, kept_blocks: int = 0) -> bool:
        """Reserve all state for the known tokens of *sequence*, and reuse the longest prefix that it can resume from.

        Sets num_computed_tokens. At least the last token is left to compute, since its logits are needed. If there is
        no room, changes nothing and returns False; *headroom_blocks* stay free for running sequences, and *kept_blocks*
        for samples. Blocks of sliding-window layers are not reserved, since each chunk takes them as needed.
        """
        (keys, num_cached), window = self._reusable_keys(sequence), self.window_blocks
        if not self.paged_blocks.fits(keys, sequence.num_tokens, headroom_blocks + kept_blocks):
            return False
        if window is not None:
            if not window.fits_prefix(
                keys, sequence.num_tokens, headroom_blocks + min(kept_blocks, window.most_of_one)
            ):
                return False
            window.admit_prefix(sequence, keys)
        self.paged_blocks.admit(sequence, keys, sequence.num_tokens)
        if self.checkpoints is not None:
            self.checkpoints.admit(sequence, keys, num_cached)
        if sequence.num_cached_tokens is None:
            self._count_stateless(len(keys), num_cached)
        sequence.num_computed_tokens = sequence.num_launched_tokens = len(keys) * self.block_size
        return True

    def can_reserve(self, num_tokens: int, num_samples: int) -> bool:
        """Whether `reserve` can ever find room for *num_samples* samples of a prompt with *num_tokens*."""
        num_blocks, window = -(-num_tokens // self.block_size), self.window_blocks
        fits_window = window is None or (
            num_blocks - window.num_passed(num_tokens) + num_samples - 1 <= window.num_blocks
        )
        return num_blocks + num_samples - 1 <= self.paged_blocks.num_blocks and fits_window

    def reserve(self, samples: Ordered[Sequence], headroom_blocks: int) -> int | None:
        """Reserve shared prompt blocks for all *samples* of a request whose state will be received.

        Each sample has its own block for the tokens after the last full block. Returns how many leading blocks are
        already cached. If there is no room, changes nothing and returns None.
        """
        first, paged, window = samples[0], self.paged_blocks, self.window_blocks
        num_tokens, num_full = first.num_tokens, first.num_tokens // self.block_size
        keys = first.block_keys(num_full, self.block_size) if self.enable_prefix_caching else []
        keys = keys[: paged.reusable(keys, len(keys))]
        headroom_blocks += (len(samples) - 1) * (num_tokens % self.block_size > 0)
        if window is not None:
            start = window.num_passed(num_tokens)
            keys = keys[: start + window.reusable(keys[start:], len(keys))]
            rest = num_tokens - start * self.block_size
            if not window.fits(keys[start:], rest, headroom_blocks):
                return None
        if not paged.fits(keys, num_tokens, headroom_blocks):
            return None
        paged.admit(first, keys, num_tokens)
        if window is not None:
            window.admit_from(first, start, keys[start:], num_tokens)
        for group in self._groups:
            for sample in samples[1:]:
                group.share(first, sample, num_full)
                group.extend(sample, num_tokens)
        return len(keys)

    def num_sample_blocks(self, num_tokens: int) -> int:
        """Return the largest number of blocks that a further sample of a prompt with *num_tokens* takes.

        This holds while the first sample keeps its blocks. Samples share the full blocks, unless they may have to
        compute the prompt again.
        That happens without a prefix cache, or if the state checkpoint to resume from is gone.
        """
        shares = self.enable_prefix_caching and self.checkpoints is None
        return 1 if shares else -(-num_tokens // self.block_size)

    def num_missing_tokens(self, sequence: Sequence) -> int:
        """Return the number of tokens left to compute; for a waiting sequence, the number if it were admitted now."""
        if sequence.block_table:
            return sequence.num_pending_tokens
        return sequence.num_tokens - len(self._reusable_keys(sequence)[0]) * self.block_size

    def fits_next(self, sequences: Collection[Sequence]) -> bool:
        """Whether there is a block for the next token of every decoding sequence."""
        paged, window = self.paged_blocks, self.window_blocks
        if sum(max(0, paged.num_missing(sequence)) for sequence in sequences) > paged.num_free_blocks:
            return False
        if window is None:
            return True
        decodes = (sequence for sequence in sequences if sequence.num_pending_tokens == 1)
        return sum(max(0, window.num_missing(sequence)) for sequence in decodes) <= window.num_free_blocks

    def awaits_tokens(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether the next *num_tokens* must wait, because a state's key needs tokens that are not known yet."""
        return self.checkpoints is not None and self.checkpoints.awaits_tokens(sequence, num_tokens)

    def _reusable_keys(self, sequence: Sequence) -> tuple[list[bytes], int]:
        """Return the keys of the blocks to resume from, and the number of cached blocks, resumable or not."""
        if not (self.enable_prefix_caching and sequence.reads_prefix_cache):
            return [], 0
        limit = (sequence.num_tokens - 1) // self.block_size
        keys = sequence.block_keys(limit, self.block_size)
        limit = self.paged_blocks.reusable(keys, limit)
        length = limit if self.window_blocks is None else self.window_blocks.resumable(keys, limit)
        length = length if self.checkpoints is None else self.checkpoints.reusable(keys, length)
        return keys[:length], limit

    def _count_stateless(self, num_reused: int, num_cached: int) -> None:
        """Count the tokens in cached blocks that are not reused, by cause."""
        if self.checkpoints is None:
            counts = {"evicted_window_tokens_total": num_cached - num_reused}
        else:
            due = max(num_reused, self.checkpoints.last_due(num_cached))
            counts = {"evicted_state_tokens_total": due - num_reused, "between_states_tokens_total": num_cached - due}
        self.stateless_tokens.update({cause: count * self.block_size for cause, count in counts.items()})

    def extend(self, sequence: Sequence, num_proposed: int = 0) -> bool:
        """Reserve room for all expected tokens of *sequence* and *num_proposed* more.

        Return False if there is no room.
        """
        num_tokens, window = sequence.num_expected_tokens + num_proposed, self.window_blocks
        return (window is None or window.extend(sequence, num_tokens)) and self.paged_blocks.extend(
            sequence, num_tokens
        )

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Set the number of computed tokens of *sequence*, and make its newly full blocks reusable."""
        first, last = sequence.num_computed_tokens // self.block_size, num_computed_tokens // self.block_size
        sequence.num_computed_tokens = num_computed_tokens
        sequence.num_launched_tokens = max(sequence.num_launched_tokens, num_computed_tokens)
        if self.enable_prefix_caching and sequence.shares_state and first < last:
            keys = sequence.block_keys(last, self.block_size)
            for index in range(first, last):
                self.paged_blocks.commit(sequence, index, keys[index])
                if self.window_blocks is not None and index >= sequence.tables[WINDOW].num_passed:
                    self.window_blocks.commit(sequence, index, keys[index])
                if self.checkpoints is not None:
                    self.checkpoints.commit(sequence, keys[index])
        if self.window_blocks is not None:
            self.window_blocks.give_back(sequence)

    def release_sequence(self, sequence: Sequence) -> None:
        """Release all state of *sequence*; committed state stays reusable."""
        for group in self._groups:
            group.release_sequence(sequence)
        if self.checkpoints is not None:
            self.checkpoints.release_sequence(sequence)
        sequence.num_computed_tokens = sequence.num_launched_tokens = 0
        sequence.shares_state = True

    def forget_sequence(self, sequence: Sequence) -> set[int]:
        """Stop the reuse of all state that *sequence* computed or resumed from, and that others computed after it.

        Returns the blocks, which sequences may still hold; these sequences and *sequence* must share no further state.
        """
        sequence.shares_state = False
        keys = sequence.block_keys(sequence.num_computed_tokens // self.block_size, self.block_size)
        if not keys:
            return set()
        keys_after, blocks = self.paged_blocks.forget_blocks(keys)
        if self.window_blocks is not None:
            keys_after |= self.window_blocks.forget_blocks(keys_after)[0]
        if self.checkpoints is not None:
            self.checkpoints.forget_checkpoints(keys_after)
        return blocks

    def clear(self) -> None:
        """Drop the reusable state that no sequence needs."""
        for group in self._groups:
            group.clear()
        if self.checkpoints is not None:
            self.checkpoints.clear()
