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
from dataclasses import dataclass
from itertools import islice
from typing import Any

from saccade.engine.block_manager import BlockManager
from saccade.engine.encode_planner import EncodePlanner
from saccade.engine.encoder_cache import EncoderCache
from saccade.engine.schedule import Left, Schedule
from saccade.engine.sequence import Sequence
from saccade.errors import QueueFull

__all__ = ["Budgets", "Schedule", "Scheduler"]

NUM_LOOKED_AT = 8
"""How far down the line a step looks for shorter prompts: behind more long ones than that, no share is worth having."""


@dataclass(frozen=True)
class Budgets:
    """What one step may do, how many sequences may wait for one, and whether pictures may be encoded aside."""

    max_num_seqs: int
    max_num_batched_tokens: int
    encode_budget_patches: int
    max_num_waiting: int = 1024
    encode_aside: bool = False


class Scheduler:
    """Waiting and running sequences; `schedule` plans a step, `commit` records that it was done."""

    def __init__(self, budgets: Budgets, block_manager: BlockManager, encoder_cache: EncoderCache[Any]) -> None:
        self.budgets = budgets
        self.block_manager = block_manager
        self.encodings = EncodePlanner(
            budgets.encode_budget_patches, budgets.encode_aside, block_manager, encoder_cache
        )
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.num_preemptions = 0
        self.num_cached_tokens = 0

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

    def add_samples(self, sequence: Sequence, samples: list[Sequence]) -> None:
        """Queue further samples of the request of *sequence*, by their arrival, with pins on what it has pinned."""
        self.encodings.share(sequence, samples)
        for sample in samples:
            bisect.insort(self.waiting, sample, key=lambda waiting: waiting.arrival)

    def schedule(self) -> Schedule:
        """Plan a step. Admits and retracts sequences, reserves their blocks and pins the encodings they need."""
        step = Schedule()
        left = Left(self.budgets.max_num_batched_tokens, self.budgets.encode_budget_patches)
        decodes = [sequence for sequence in self.running if sequence.num_pending_tokens == 1]
        self.encodings.begin(any(sequence.num_generated_tokens for sequence in decodes))
        for sequence in decodes:
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
                self.encodings.unpin(sequence, sequence.num_computed_tokens)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, wherever it stands, and free what it holds."""
        for line in (self.running, self.waiting, self.parked):
            if sequence in line:
                line.remove(sequence)
                break
        self.block_manager.release(sequence)
        self.encodings.let_go(sequence)

    def park(self, sequence: Sequence, step: Schedule, media: list[int]) -> None:
        """Take *sequence* out of the step, and out of line until resume(): it lacks the pixels of *media*."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.block_manager.release(sequence)
            self.encodings.unpin(sequence)
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
        self.encodings.unpin(sequence)
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)
        self.num_preemptions += 1

    def _admit(self, step: Schedule, left: Left) -> None:
        while self.waiting and left.tokens > 0 and len(self.running) < self.budgets.max_num_seqs:
            sequence = self.waiting[0]
            if lacking := self.encodings.lacking(sequence, step):
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

    def _add_chunk(self, sequence: Sequence, step: Schedule, left: Left, is_last: bool = False) -> None:
        """Give *sequence* its share of what is left of the step, or all it needs where it *is_last* in line for it."""
        planned = step.chunks.get(sequence, 0)
        room = planned + left.tokens
        num_tokens = sequence.num_pending_tokens
        if num_tokens > room:
            num_tokens = room if is_last or not self._shorter_behind(sequence) else -(-room // 2)
        if num_tokens > 1:
            num_tokens = self.block_manager.chunk(sequence, num_tokens)
        if sequence.sources and num_tokens > planned:
            num_tokens = self.encodings.plan(sequence, num_tokens, step, left)
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
