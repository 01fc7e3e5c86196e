"""Block keys of prompts, remembered in segments, so that a continued or repeated chat is hashed only in part."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3

from saccade.byte_lru import ByteLru
from saccade.identity.blocks import INT64, MediaRun, block_keys, runs_within

SEGMENT_BLOCKS = 256
BYTES_PER_KEY = 72
"""The memory of one key: an object of 49 bytes, in a size class of 64, and its place in a list."""

BYTES_PER_SEGMENT = 640
"""The memory of a segment besides its keys, of which a short prompt has none."""

BYTES_PER_RUN = 280
"""The memory of one image's place in a segment: a tuple, three numbers and the hash."""

MAX_BYTES = 32 << 20
"""About 450,000 keys: 7 million tokens in blocks of 16."""


class _PromptSegment(NamedTuple):
    """The inputs of a segment's keys; *tokens* is a digest of the token ids."""

    parent: bytes
    block_size: int
    tokens: bytes
    runs: tuple[MediaRun, ...]


class PromptKeys:
    """Computes the keys that saccade.identity.blocks defines, and remembers up to *max_bytes* of them.

    The keys of a prompt of 128k tokens take several milliseconds to compute, and less than one to look up.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._segments: ByteLru[_PromptSegment, list[bytes]] = ByteLru(max_bytes)

    @property
    def num_bytes(self) -> int:
        """The memory of the keys."""
        return self._segments.num_bytes

    def of(self, root: bytes, token_ids: Sequence[int], runs: Sequence[MediaRun], block_size: int) -> list[bytes]:
        """Return the result of block_keys()."""
        packed = array(INT64, token_ids)
        size = SEGMENT_BLOCKS * block_size
        keys: list[bytes] = []
        for start in range(0, len(packed), size):
            within = runs_within(runs, start, start + size)
            keys += self._segment(keys[-1] if keys else root, packed[start : start + size], within, block_size)
        return keys

    def _segment(
        self, parent: bytes, token_ids: "array[int]", runs: tuple[MediaRun, ...], block_size: int
    ) -> list[bytes]:
        segment = _PromptSegment(parent, block_size, blake3(token_ids.tobytes()).digest(), runs)
        keys = self._segments.get(segment)
        if keys is None:
            keys = block_keys(parent, token_ids, runs, block_size)
            num_bytes = BYTES_PER_SEGMENT + len(keys) * BYTES_PER_KEY + len(runs) * BYTES_PER_RUN
            self._segments.put(segment, keys, num_bytes)
        return keys
