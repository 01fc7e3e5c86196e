"""Choose the next batch. No torch.

Every step decodes all that is decoding, then goes on with unfinished prefills, then admits waiting sequences: each in
the order they came, under a token budget, a patch budget for the vision encoder, and the KV blocks there are.
A decode that finds no block retracts the newest running sequence, which will be recomputed.

Fairness: a prompt that does not end in this step leaves half of what is left of the token budget, where one behind it
needs at most half as many tokens as it does: waiting for each other, that one would lose more time than this one. What
those behind it leave over goes to it after all. So a prompt of s tokens behind k <= 8 that need twice as many each has
its first token ceil(s / floor(t / 2**k)) steps after its admission at the latest, however long the others are, and a
step later for each of them that ends meanwhile; t is the room that a step has beside its decodes. The first in line
never gets less than half of t. Admission itself stays in the order of arrival.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from saccade.engine.block_manager import BlockManager
from saccade.engine.encoder_cache import EncoderCache, EncoderKey
from saccade.engine.pixels import PixelSource
from saccade.engine.sequence import Sequence
from saccade.errors import QueueFull

NUM_LOOKED_AT = 8
"""How far down the line a step looks for shorter prompts: behind more long ones than that, no share is worth having."""


@dataclass(slots=True)
class Schedule:
    """One step's work: how many tokens of which sequence, and which pictures must be encoded before.

    *encode* maps a key to everyone in the step who brings or needs that picture, first comer first. *lacking* maps
    parked sequences to the indices of pictures that they need and nobody can bring.
    """

    chunks: dict[Sequence, int] = field(default_factory=dict)
    encode: dict[EncoderKey, list[tuple[Sequence, PixelSource]]] = field(default_factory=dict)
    lacking: dict[Sequence, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Budgets:
    """What one step may do, and how many sequences may wait for one."""

    max_num_seqs: int
    max_num_batched_tokens: int
    encode_budget_patches: int
    max_num_waiting: int = 1024


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
        self.parked: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_encoder_cache_hits = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence could be worked on; a parked one waits for its pixels."""
        return bool(self.waiting or self.running)

    def check_queue(self) -> None:
        """Raise QueueFull where as many sequences wait as may."""
        if len(self.waiting) + len(self.parked) >= self.budgets.max_num_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting at this worker already; try again shortly.")

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def hold_encodings(self, sequence: Sequence) -> None:
        """Keep the pictures that further samples of the request will look at pinned until `add_samples`.

        They reuse the prompt's full blocks and compute the rest, or all of it where there is no prefix cache.
        """
        manager, last = self.block_manager, sequence.num_prompt_tokens - 1
        reused = last // manager.block_size * manager.block_size if manager.enable_prefix_caching else 0
        for source in sequence.sources:
            source.held = source.end > reused

    def add_samples(self, sequence: Sequence, samples: list[Sequence]) -> None:
        """Queue further samples of the request of *sequence*, by their arrival, with pins on what it has pinned."""
        for sample in samples:
            for source, own in zip(sequence.sources, sample.sources, strict=True):
                if source.pinned:
                    self.encoder_cache.pin(own.key)
                    own.pinned = True
                if source.kept:
                    self.encoder_cache.pin(own.key)
                    own.kept = True
            bisect.insort(self.waiting, sample, key=lambda waiting: waiting.arrival)
        for source in sequence.sources:
            source.held = False

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
        for sequence in [owner for owner, num_tokens in step.chunks.items() if num_tokens < owner.num_pending_tokens]:
            self._add_chunk(sequence, step, left, is_last=True)
        for sequence in [sequence for sequence in step.lacking if sequence in self.running]:
            self.park(sequence, step, step.lacking[sequence])
        return step

    def commit(self, step: Schedule) -> None:
        """Record that the step's tokens are computed."""
        for sequence, num_tokens in step.chunks.items():
            self.block_manager.commit(sequence, sequence.num_computed_tokens + num_tokens)
            if sequence.sources:
                self._unpin(sequence, sequence.num_computed_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, wherever it stands, and free what it holds."""
        for line in (self.running, self.waiting, self.parked):
            if sequence in line:
                line.remove(sequence)
                break
        self.block_manager.release(sequence)
        self._unpin(sequence)
        self._let_go(sequence)

    def park(self, sequence: Sequence, step: Schedule, media: list[int]) -> None:
        """Take *sequence* out of the step, and out of line until resume(): it lacks the pixels of *media*."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.block_manager.release(sequence)
            self._unpin(sequence)
        else:
            self.waiting.remove(sequence)
        step.chunks.pop(sequence, None)
        step.lacking[sequence] = media
        self.parked.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Put a parked sequence, whose pixels are here, back in line by its arrival."""
        self.parked.remove(sequence)
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)

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
            if lacking := self._lacking(sequence, step):
                self.park(sequence, step, lacking)
                continue
            # One block of headroom for each running sequence: otherwise the newcomer would be retracted at once.
            if not self.block_manager.admit(sequence, headroom_blocks=len(self.running)):
                return
            del self.waiting[0]
            self.running.append(sequence)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self.num_cached_tokens += sequence.num_computed_tokens
            self._add_chunk(sequence, step, left)

    def _add_chunk(self, sequence: Sequence, step: Schedule, left: _Left, is_last: bool = False) -> None:
        """Give *sequence* its share of what is left of the step, or all it needs where it *is_last* in line for it."""
        planned = step.chunks.get(sequence, 0)
        room = planned + left.tokens
        num_tokens = sequence.num_pending_tokens
        if num_tokens > room:
            num_tokens = room if is_last or not self._shorter_behind(sequence) else -(-room // 2)
        if num_tokens > 1:
            num_tokens = self.block_manager.chunk(sequence, num_tokens)
        if sequence.sources and num_tokens > planned:
            num_tokens = self._plan_media(sequence, num_tokens, step, left)
        if num_tokens > planned:
            step.chunks[sequence] = num_tokens
            left.tokens -= num_tokens - planned

    def _shorter_behind(self, sequence: Sequence) -> bool:
        """Whether one of the next in line behind *sequence* needs at most half as many tokens as it does."""
        most = sequence.num_pending_tokens // 2
        return any(
            other.num_pending_tokens <= most or self.block_manager.num_missing_tokens(other) <= most
            for other in islice(self._behind(sequence), NUM_LOOKED_AT)
        )

    def _behind(self, sequence: Sequence) -> Iterator[Sequence]:
        following = self.running[self.running.index(sequence) + 1 :]
        yield from (other for other in following if other.num_pending_tokens > 1)
        yield from self.waiting[: self.budgets.max_num_seqs - len(self.running)]

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
            elif not source.available:
                step.lacking[sequence] = self._lacking(sequence, step)
                return max(0, run.start - start)
            # A picture over the whole budget would never fit: it is encoded by itself.
            elif source.key.num_patches <= left.patches or left.patches == self.budgets.encode_budget_patches:
                left.patches = max(0, left.patches - source.key.num_patches)
                step.encode[source.key] = [(sequence, source)]
            else:
                return max(0, run.start - start)
            self.encoder_cache.pin(source.key)
            source.pinned = True
        return num_tokens

    def _lacking(self, sequence: Sequence, step: Schedule) -> list[int]:
        """Return the pictures of *sequence* that came without pixels, where it needs one that nobody can bring.

        All of them, because its gateway is asked only once, and the others may be gone when the answer is here. Where
        nothing is lacking, they are kept for as long as the sequence lives: once the gateway has dropped a picture,
        nobody could bring it again.
        """
        absent = [(index, source) for index, source in enumerate(sequence.sources) if not source.available]
        if not absent:
            return []
        num_reused = sequence.num_tokens - self.block_manager.num_missing_tokens(sequence)
        here = {source.key for _, source in absent if source.key in self.encoder_cache or source.key in step.encode}
        if any(source.end > num_reused and source.key not in here for _, source in absent):
            return [index for index, _ in absent]
        for _, source in absent:
            if source.key in here and not source.kept:
                self.encoder_cache.pin(source.key)
                source.kept = True
        return []

    def _let_go(self, sequence: Sequence) -> None:
        for source in sequence.sources:
            if source.kept:
                self.encoder_cache.unpin(source.key)
                source.kept = False

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
            computed = num_computed_tokens is not None and source.end <= num_computed_tokens and not source.held
            if source.pinned and (num_computed_tokens is None or computed):
                self.encoder_cache.unpin(source.key)
                source.pinned = False
