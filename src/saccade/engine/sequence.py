"""One request as the scheduler sees it. No torch."""

import bisect
from array import array
from typing import Protocol

import numpy as np
import numpy.typing as npt

from saccade.engine.pixels import PixelSource
from saccade.identity.blocks import MediaRun, block_key
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest

SEED_MASK = (1 << 64) - 1


class Positions(Protocol):
    """Positions of a whole sequence, by one formula for prefill, decode and recomputation."""

    delta: int

    def slice(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions [3, stop - start] of tokens [start, stop)."""


class Sequence:
    """A prompt, the answer so far, and how much of both has its KV state computed.

    *token_ids* holds prompt and answer. *num_computed_tokens* of them have KV state; a step computes some of the rest,
    and when none is left, the next token is sampled. A retracted sequence starts again from 0: prompt and answer are
    then one long prompt. *block_table* names the paged blocks; *runs* (by start) say which tokens show which pictures,
    and run_sources[i] is the source of runs[i]. *arrival* orders sequences and is unique.
    """

    def __init__(
        self, connection: int, request: EngineRequest, arrival: int, seed: int, root: bytes, positions: Positions
    ) -> None:
        self.connection = connection
        self.request_id = request.request_id
        self.arrival = arrival
        self.sampling = request.sampling
        self.seed = seed & SEED_MASK
        self.token_ids = list(request.token_ids)
        self.num_prompt_tokens = len(request.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.block_table = array("q")
        self.positions = positions
        self.sources = [PixelSource(item, request.salt, f"media[{index}]") for index, item in enumerate(request.media)]
        self.runs: list[MediaRun] = []
        self.run_sources: list[PixelSource] = []
        self._place_media(request)
        self._keys = [root]
        self.finish_reason: FinishReason | None = None

    def _place_media(self, request: EngineRequest) -> None:
        placed = []
        for item, source in zip(request.media, self.sources, strict=True):
            offset = 0
            for span in item.spans:
                placed.append((MediaRun(span.start, span.length, item.content_hash, offset), source))
                offset += span.length
        placed.sort(key=lambda pair: pair[0].start)
        self.runs = [run for run, _ in placed]
        self._run_starts = [run.start for run in self.runs]
        self._run_ends = [run.start + run.length for run in self.runs]
        self.run_sources = [source for _, source in placed]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of the answer."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens without KV state; 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def recomputable(self) -> bool:
        """Whether the sequence could be started again from nothing, whatever the caches have dropped."""
        return all(source.available for source in self.sources)

    def media_between(self, start: int, stop: int) -> list[tuple[MediaRun, PixelSource]]:
        """Return the runs that overlap tokens [start, stop), in order, each with its source."""
        first, last = bisect.bisect_right(self._run_ends, start), bisect.bisect_left(self._run_starts, stop)
        return list(zip(self.runs[first:last], self.run_sources[first:last], strict=True))

    def block_keys(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the keys of the first *num_blocks* blocks, which must be full of known tokens."""
        for index in range(len(self._keys) - 1, num_blocks):
            start, stop = index * block_size, (index + 1) * block_size
            runs = [run for run, _ in self.media_between(start, stop)]
            self._keys.append(block_key(self._keys[-1], self.token_ids[start:stop], start, runs))
        return self._keys[1 : num_blocks + 1]
