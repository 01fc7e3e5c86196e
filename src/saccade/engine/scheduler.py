"""Choose the next batch. No torch.

Every step decodes all that is decoding, then goes on with unfinished prefills, then admits waiting sequences: each in
the order they came, under a token budget, a patch budget for the vision encoder, and the KV blocks there are.
A decode that finds no block retracts the newest running sequence, which will be recomputed.
"""

import bisect
from dataclasses import dataclass, field
from typing import Any

from saccade.engine.block_manager import BlockManager
from saccade.engine.encoder_cache import EncoderCache, EncoderKey
from saccade.engine.pixels import PixelSource
from saccade.engine.sequence import Sequence


@dataclass(slots=True)
class Schedule:
    """One step's work: how many tokens of which sequence, and which pictures must be encoded before.

    *encode* maps a key to everyone in the step who brings or needs that picture, first comer first.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    encode: dict[EncoderKey, list[tuple[Sequence, PixelSource]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Budgets:
    """What one step may do."""

    max_num_seqs: int
    max_num_batched_tokens: int
    encode_budget_patches: int


@dataclass(slots=True)
class _Left:
    """What is left of the budgets in the step being planned."""

    tokens: int
    patches: int


class Scheduler:
    """Waiting and running sequences; `schedule` plans a step, `commit` records that it was done."""

    def __init__(self, budgets: Budgets, block_manager: BlockManager, encoder_cache: EncoderCache[Any]) -> None:
        self.budgets = budgets
        self.block_manager = block_manager
        self.encoder_cache = encoder_cache
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_encoder_cache_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Plan a step. Admits and retracts sequences, reserves their blocks and pins the encodings they need."""
        step = Schedule()
        left = _Left(self.budgets.max_num_batched_tokens, self.budgets.encode_budget_patches)
        for sequence in [sequence for sequence in self.running if sequence.num_pending_tokens == 1]:
            if sequence in self.running and self._make_room(sequence, step):
                self._add_chunk(sequence, step, left)
        for sequence in self.running:
            if sequence not in step.chunks:
                self._add_chunk(sequence, step, left)
        self._admit(step, left)
        return step

    def commit(self, step: Schedule) -> None:
        """Record that the step's tokens are computed."""
        for sequence, num_tokens in step.chunks.items():
            self.block_manager.commit(sequence, sequence.num_computed_tokens + num_tokens)
            if sequence.sources:
                self._unpin(sequence, sequence.num_computed_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, wherever it stands, and free what it holds."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.block_manager.release(sequence)
        self._unpin(sequence)

    def retract(self, sequence: Sequence) -> None:
        """Take a running sequence's state away between two steps; its turn comes again by its arrival."""
        self.running.remove(sequence)
        self.block_manager.release(sequence)
        self._unpin(sequence)
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)
        self.num_preemptions += 1

    def _admit(self, step: Schedule, left: _Left) -> None:
        while self.waiting and left.tokens > 0 and len(self.running) < self.budgets.max_num_seqs:
            sequence = self.waiting[0]
            # One block of headroom for each running sequence: otherwise the newcomer would be retracted at once.
            if not self.block_manager.admit(sequence, headroom_blocks=len(self.running)):
                return
            del self.waiting[0]
            self.running.append(sequence)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self.num_cached_tokens += sequence.num_computed_tokens
            self._add_chunk(sequence, step, left)

    def _add_chunk(self, sequence: Sequence, step: Schedule, left: _Left) -> None:
        num_tokens = min(sequence.num_pending_tokens, left.tokens)
        if sequence.sources and num_tokens:
            num_tokens = self._plan_media(sequence, num_tokens, step, left)
        if num_tokens:
            step.chunks[sequence] = num_tokens
            left.tokens -= num_tokens

    def _plan_media(self, sequence: Sequence, num_tokens: int, step: Schedule, left: _Left) -> int:
        """Plan the encodings a chunk needs; return its length, which stops before a picture that does not fit."""
        start = sequence.num_computed_tokens
        for run, source in sequence.media_between(start, start + num_tokens):
            if source.pinned:
                continue
            if source.key in step.encode:
                step.encode[source.key].append((sequence, source))
                self.num_encoder_cache_hits += 1
            elif source.key in self.encoder_cache:
                self.num_encoder_cache_hits += 1
            # A picture over the whole budget would never fit: it is encoded by itself.
            elif source.num_patches <= left.patches or left.patches == self.budgets.encode_budget_patches:
                left.patches = max(0, left.patches - source.num_patches)
                step.encode[source.key] = [(sequence, source)]
            else:
                return max(0, run.start - start)
            self.encoder_cache.pin(source.key)
            source.pinned = True
        return num_tokens

    def _make_room(self, sequence: Sequence, step: Schedule) -> bool:
        """Reserve the block a decode needs, retracting others; False where *sequence* itself had to go."""
        while not self.block_manager.extend(sequence):
            # Those that could not be started again go last; among the others the newest goes first.
            victim = max(self.running, key=lambda candidate: (candidate.recomputable, candidate.arrival))
            self.retract(victim)
            step.chunks.pop(victim, None)
            if victim is sequence:
                return False
        return True

    def _unpin(self, sequence: Sequence, num_computed_tokens: int | None = None) -> None:
        """Unpin the sequence's encodings: all, or those whose every token is computed."""
        for source in sequence.sources:
            if source.pinned and (num_computed_tokens is None or source.end <= num_computed_tokens):
                self.encoder_cache.unpin(source.key)
                source.pinned = False
