"""Choose the pictures to encode, and keep encodings for as long as somebody needs them. No torch.

A chunk stops before a picture that does not fit the step's patch budget; one over the whole budget is encoded by
itself. Where nobody decodes, pictures are encoded in the step that needs them. Where somebody does, and the machine has
threads for both, they are encoded aside, one job after the other, while steps go on; only their own sequences wait.
Further pictures would wait long, and steps for a few decodes are a poor use of a machine that has pictures to encode.
So one of those is encoded within a step after all, and then none until the decodes have had about as much time for
themselves. A second job stands ready all the while: a step that encodes is long, and nothing begins before it ends.
"""

from collections.abc import Iterable
from typing import Any

from saccade.engine.block_manager import BlockManager
from saccade.engine.encoder_cache import EncoderCache, EncoderKey
from saccade.engine.pixels import PixelSource
from saccade.engine.schedule import Left, Schedule
from saccade.engine.sequence import Sequence

PATCHES_A_STEP = 80
"""Patches that take about as long to encode as a step that decodes: measured with a small network on a CPU."""


NUM_JOBS = 2
"""How many jobs may be aside, the one that waits included."""


class EncodePlanner:
    """*budget_patches*: of a step, or of a job *aside*. *in_flight*: the pictures of each job; the engine sets it."""

    def __init__(
        self, budget_patches: int, aside: bool, block_manager: BlockManager, encoder_cache: EncoderCache[Any]
    ) -> None:
        self.encoder_cache = encoder_cache
        self.in_flight: tuple[frozenset[EncoderKey], ...] = ()
        self.num_hits = 0
        self._is_beside = False
        self._owed_patches = 0
        self._budget_patches = budget_patches
        self._aside = aside
        self._block_manager = block_manager

    def hold(self, sequence: Sequence) -> None:
        """Keep the pictures that further samples of the request will look at pinned until `share`.

        They reuse the prompt's full blocks and compute the rest, or all of it where there is no prefix cache.
        """
        manager, last = self._block_manager, sequence.num_prompt_tokens - 1
        reused = last // manager.block_size * manager.block_size if manager.enable_prefix_caching else 0
        for source in sequence.sources:
            source.held = source.end > reused

    def share(self, sequence: Sequence, samples: Iterable[Sequence]) -> None:
        """Give further samples of the request of *sequence* pins on what it has pinned."""
        for sample in samples:
            for source, own in zip(sequence.sources, sample.sources, strict=True):
                if source.pinned:
                    self.encoder_cache.pin(own.key)
                    own.pinned = True
                if source.kept:
                    self.encoder_cache.pin(own.key)
                    own.kept = True
        for source in sequence.sources:
            source.held = False

    def begin(self, decodes: bool) -> None:
        """Begin to plan a step, in which somebody *decodes* or not."""
        self._is_beside = self._aside and decodes
        self._owed_patches = max(0, self._owed_patches - PATCHES_A_STEP) if self._is_beside else 0

    def plan(self, sequence: Sequence, num_tokens: int, step: Schedule, left: Left) -> int:
        """Plan the encodings a chunk needs; return its length, which stops before a picture that will not be there."""
        start = sequence.num_computed_tokens
        for run, source in sequence.media_between(start, start + num_tokens):
            if not source.pinned and self._claim(sequence, source, step, left):
                self.encoder_cache.pin(source.key)
                source.pinned = True
            if not source.pinned or source.key in step.aside or self._is_in_flight(source.key):
                return max(0, run.start - start)
        return num_tokens

    def _claim(self, sequence: Sequence, source: PixelSource, step: Schedule, left: Left) -> bool:
        """Return whether the picture is there, or is being encoded, or will be in this step or aside from now on."""
        if source.key in step.encode:
            step.encode[source.key].append((sequence, source))
            self.num_hits += 1
        elif source.key in self.encoder_cache or self._is_in_flight(source.key):
            self.num_hits += 1
        elif not source.available:
            step.lacking[sequence] = self.lacking(sequence, step)
            return False
        elif self._fits(source.key, left):
            left.patches = max(0, left.patches - source.key.num_patches)
            step.encode[source.key] = [(sequence, source)]
            if self._is_beside and len(self.in_flight) < NUM_JOBS:
                step.aside.add(source.key)
            elif self._is_beside:
                self._owed_patches += source.key.num_patches
        else:
            return False
        return True

    def lacking(self, sequence: Sequence, step: Schedule) -> list[int]:
        """Return the pictures of *sequence* that came without pixels, where it needs one that nobody can bring.

        All of them, because its gateway is asked only once, and the others may be gone when the answer is here. Where
        nothing is lacking, they are kept for as long as the sequence lives: once the gateway has dropped a picture,
        nobody could bring it again.
        """
        absent = [(index, source) for index, source in enumerate(sequence.sources) if not source.available]
        if not absent:
            return []
        num_reused = sequence.num_tokens - self._block_manager.num_missing_tokens(sequence)
        here = {source.key for _, source in absent if self._is_here(source.key, step)}
        if any(source.end > num_reused and source.key not in here for _, source in absent):
            return [index for index, _ in absent]
        for _, source in absent:
            if source.key in here and not source.kept:
                self.encoder_cache.pin(source.key)
                source.kept = True
        return []

    def unpin(self, sequence: Sequence, num_computed_tokens: int | None = None) -> None:
        """Unpin the sequence's encodings: all, or those whose every token is computed."""
        for source in sequence.sources:
            computed = num_computed_tokens is not None and source.end <= num_computed_tokens and not source.held
            if source.pinned and (num_computed_tokens is None or computed):
                self.encoder_cache.unpin(source.key)
                source.pinned = False

    def let_go(self, sequence: Sequence) -> None:
        """Keep nothing for a sequence that ended."""
        self.unpin(sequence)
        for source in sequence.sources:
            if source.kept:
                self.encoder_cache.unpin(source.key)
                source.kept = False

    def _fits(self, key: EncoderKey, left: Left) -> bool:
        if len(self.in_flight) >= NUM_JOBS and self._owed_patches > 0:
            return False
        # A picture over the whole budget would never fit: it is encoded by itself.
        return key.num_patches <= left.patches or left.patches == self._budget_patches

    def _is_here(self, key: EncoderKey, step: Schedule) -> bool:
        return key in self.encoder_cache or key in step.encode or self._is_in_flight(key)

    def _is_in_flight(self, key: EncoderKey) -> bool:
        return any(key in job for job in self.in_flight)
