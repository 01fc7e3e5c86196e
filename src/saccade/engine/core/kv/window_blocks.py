"""Manages the attention state of sliding-window layers, and frees the blocks that no later token sees.

Does not import torch.
"""

from collections.abc import Sequence as Ordered

from saccade.engine.core.kv.blocks import PagedBlocks, StoredContent
from saccade.engine.core.sequence import WINDOW, Sequence
from saccade.models.spec import blocks_seen, most_window_blocks
from saccade.protocol.kv_events import StateRemoved, StateStored


class WindowBlocks(PagedBlocks):
    """Blocks of layers in which a token sees the last *window* tokens, itself included.

    A prompt gets its blocks chunk by chunk, and each commit gives back those that no later token sees. So a sequence
    holds only the blocks of its window and of one chunk. These are at most *most_of_one* if the chunk has no image
    longer than *longest_whole* tokens. A prefix can be reused if the last *num_seen* of its blocks are stored.
    """

    group = WINDOW
    removed = StateRemoved

    def __init__(self, num_blocks: int, block_size: int, window: int, longest_whole: int = 0) -> None:
        super().__init__(num_blocks, block_size)
        self.window = window
        self.num_seen = blocks_seen(window, block_size)
        self.most_of_one = most_window_blocks(window, block_size, longest_whole)
        self._longest_whole = longest_whole

    def resumable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        """Return the length of the longest prefix of *keys*, at most *num_blocks*, whose last blocks are stored."""
        stop = num_blocks
        for index in range(num_blocks - 1, -1, -1):
            if stop - index > self.num_seen:
                break
            if keys[index] not in self._block_of:
                stop = index
        return stop

    def num_passed(self, num_tokens: int) -> int:
        """Return how many leading blocks are no longer needed after *num_tokens* are computed.

        The request's other samples may go on from the last block boundary before the last token.
        """
        return max(0, (num_tokens - 1) // self.block_size - self.num_seen)

    def fits_prefix(self, keys: Ordered[bytes], num_tokens: int, headroom_blocks: int) -> bool:
        """Whether a sequence with *num_tokens* has room to go on after the blocks of *keys*.

        It needs room for a whole image, or for all its tokens if they end sooner.
        """
        first = self._first_seen(keys)
        stop = min(num_tokens, len(keys) * self.block_size + max(self._longest_whole, 1))
        return self.fits(keys[first:], stop - first * self.block_size, headroom_blocks)

    def admit_prefix(self, sequence: Sequence, keys: Ordered[bytes]) -> None:
        """Reference the blocks of *keys* that the next token sees."""
        first = self._first_seen(keys)
        self.admit_from(sequence, first, keys[first:], 0)

    def admit_from(self, sequence: Sequence, first: int, keys: Ordered[bytes], num_tokens: int) -> None:
        """Reference the blocks of *keys* from position *first* on, and allocate the rest up to *num_tokens*."""
        table = sequence.tables[WINDOW]
        table.blocks.extend([0] * first)
        table.num_passed = first
        self.admit(sequence, keys, num_tokens)

    def grow(self, sequence: Sequence, num_tokens: int, headroom_blocks: int) -> int:
        """Allocate blocks for the next *num_tokens*, or for as many as fit. Return how many of them have blocks now."""
        start, num_blocks = sequence.num_launched_tokens, len(sequence.tables[WINDOW].blocks)
        num_blocks += max(0, self.num_free_blocks - headroom_blocks)
        num_tokens = min(num_tokens, num_blocks * self.block_size - start)
        self.extend(sequence, start + num_tokens)
        return num_tokens

    def give_back(self, sequence: Sequence) -> None:
        """Release the leading blocks that are not needed after the computed tokens of *sequence*."""
        table, num_passed = sequence.tables[WINDOW], self.num_passed(sequence.num_computed_tokens)
        for block in table.blocks[table.num_passed : num_passed]:
            self._let_go(block)
        table.num_passed = max(table.num_passed, num_passed)

    def _first_seen(self, keys: Ordered[bytes]) -> int:
        return max(0, len(keys) - self.num_seen)

    def _stored_event(self, key: bytes, content: StoredContent) -> StateStored:
        return StateStored(key)
