"""Choose the next batch. No torch.

Every step includes all decodes, then continues unfinished prefills, then admits waiting sequences. Each group is in
order of arrival, within a token budget, a patch budget for the vision encoder, and the available KV blocks. A decode
without a free block preempts the newest running sequence, which is computed again later.

Fairness: a prompt that does not end in this step leaves half of the remaining token budget if a later prompt needs at
most half as many tokens. Waiting costs the shorter prompt relatively more time than the longer one. Tokens that the
later prompts do not use go to the long prompt after all. So a prompt of s tokens after k <= 8 prompts that each need
twice as many has its first token at most ceil(s / floor(t / 2**k)) steps after its admission, however long the others
are, plus one step for each of them that ends meanwhile; t is the step's token budget without its decodes. The first
prompt never gets less than half of t. Admission itself stays in order of arrival.
"""

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, takewhile

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.encoder_scheduler import EncodeCosts, EncoderScheduler
from saccade.engine.core.images import CLAIMS
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.schedule import RemainingBudget, Schedule
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step_builder import Rows
from saccade.errors import QueueFull

__all__ = ["Budgets", "Schedule", "Scheduler"]

NUM_LOOKED_AT = 8
"""How many later prompts a step examines for shorter ones. After more long prompts, the share would be too small to
help.
"""


@dataclass(frozen=True)
class Budgets:
    """The limits of one step, of waiting sequences, and whether images may be encoded in *background_jobs*."""

    max_num_seqs: int
    max_num_batched_tokens: int
    encode_budget_patches: int
    max_num_waiting: int = 1024
    background_jobs: bool = False


class Scheduler:
    """Waiting and running sequences; `schedule` plans a step, `commit` records that it was done.

    A sequence is *waiting* (by arrival), *running* (in order of admission) or *parked*. If the prompt's state goes to
    another engine, the sequence is *sending* after its first token. If it comes from one, all samples are *receiving*,
    by their sample 0. Both hold blocks, and rows now or soon. A sequence that ended while a step in flight computes one
    token too many is *leaving*: its row and blocks are free when that step is collected. The cost of a plan is linear
    in the number of sequences.

    The state of a prompt is sent when every sample has its first token. So such a prompt is admitted only with rows for
    all samples and blocks for one more of them, which are kept. The other samples go before everything else that waits,
    and each ends at its first token. Otherwise sending prompts could hold every row while they wait for samples without
    one.
    """

    def __init__(
        self, budgets: Budgets, block_manager: BlockManager, encoder_cache: EncoderCache, costs: EncodeCosts
    ) -> None:
        self.budgets = budgets
        self.block_manager = block_manager
        self.rows = Rows(budgets.max_num_seqs)
        self.encoder_scheduler = EncoderScheduler(
            budgets.encode_budget_patches, budgets.background_jobs, block_manager, encoder_cache, costs
        )
        self.waiting: list[Sequence] = []
        self.running: dict[Sequence, None] = {}
        self.parked: dict[Sequence, None] = {}
        self.sending: dict[Sequence, None] = {}
        self.leaving: dict[Sequence, None] = {}
        self.receiving: dict[Sequence, list[Sequence]] = {}
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._newest_preempted = 0
        self._is_blocked = False

    @property
    def has_work(self) -> bool:
        """Whether a step could compute something.

        Parked sequences wait for pixels and do not count, nor do sequences that wait for the end of a transfer.
        """
        return bool(self.running or (self.waiting and not self._is_blocked))

    @property
    def num_admitted(self) -> int:
        """Number of sequences that need a row."""
        return len(self.running) + len(self.sending) + len(self.leaving) + sum(map(len, self.receiving.values()))

    @property
    def can_go_ahead(self) -> bool:
        """Whether a step can be planned while another one is in flight: a sequence can go on, and none is preempted."""
        blocks = self.block_manager.paged_blocks
        num_missing = sum(max(0, blocks.num_missing(sequence)) for sequence in self.running)
        return num_missing <= blocks.num_free_blocks and not all(sequence.waits_for_commit for sequence in self.running)

    def check_queue(self) -> None:
        """Raise QueueFull if the maximum number of sequences is waiting."""
        if len(self.waiting) + len(self.parked) >= self.budgets.max_num_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting at this worker already; try again shortly.")

    def add(self, sequence: Sequence) -> None:
        self._queue(sequence)

    def add_samples(self, sequence: Sequence, samples: list[Sequence]) -> None:
        """Queue further samples of the request of *sequence*, by their arrival, and give them its pins."""
        self.encoder_scheduler.share(sequence, samples)
        for sample in samples:
            self._queue(sample)

    def schedule(self) -> Schedule:
        """Plan a step. Admits and preempts sequences, reserves their blocks and pins the encoder outputs they need."""
        step = Schedule()
        remaining = RemainingBudget(self.budgets.max_num_batched_tokens, self.budgets.encode_budget_patches)
        ready = [sequence for sequence in self.running if not sequence.waits_for_commit]
        decodes = [sequence for sequence in ready if sequence.num_pending_tokens == 1]
        self.encoder_scheduler.begin(any(sequence.num_generated_tokens for sequence in decodes))
        victims = self._victims()
        for sequence in decodes:
            if sequence in self.running and self._make_room(sequence, victims, step):
                self._add_chunk(sequence, step, remaining)
        self._continue([one for one in ready if one in self.running and one not in step.chunks], step, remaining)
        self._admit(step, remaining)
        for sequence in [owner for owner, num_tokens in step.chunks.items() if num_tokens < owner.num_pending_tokens]:
            self._add_chunk(sequence, step, remaining)
        for sequence in [sequence for sequence in step.missing_images if sequence in self.running]:
            self.park(sequence, step, step.missing_images[sequence])
        # Only the end of a transfer makes room then.
        self._is_blocked = not self.running and bool(self.sending or self.receiving)
        return step

    def launch(self, step: Schedule) -> None:
        """Record that *step* is in flight: the next one is planned from its end."""
        for sequence, num_tokens in step.chunks.items():
            sequence.num_launched_tokens += num_tokens
            sequence.num_steps_in_flight += 1

    def commit(self, step: Schedule) -> int:
        """Record the tokens that *step* computed, except those of sequences that have ended; return their number."""
        num_computed = 0
        for sequence, num_tokens in step.chunks.items():
            sequence.num_steps_in_flight -= 1
            if sequence in self.leaving and not sequence.num_steps_in_flight:
                del self.leaving[sequence]
                self._release(sequence)
            if sequence.finish_reason is not None:
                continue
            start = sequence.num_computed_tokens
            self.block_manager.commit(sequence, start + num_tokens)
            if sequence.images:
                self.encoder_scheduler.commit(sequence, start)
            num_computed += num_tokens
        return num_computed

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which ended or lacks pixels, from every queue, and free its state."""
        if sequence in self.running:
            del self.running[sequence]
        elif sequence in self.parked:
            del self.parked[sequence]
        elif sequence in self.sending:
            del self.sending[sequence]
        elif sequence in self.receiving:
            del self.receiving[sequence]
        else:
            self._unqueue(sequence)
        if sequence.num_steps_in_flight:
            self.leaving[sequence] = None
        else:
            self._release(sequence)
        self.encoder_scheduler.unpin(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Keep the state of a running sequence, which computes no more, until remove()."""
        del self.running[sequence]
        self.sending[sequence] = None

    def finish_receiving(self, sequence: Sequence) -> None:
        """Begin to decode the samples of *sequence*: their prompt's state has arrived."""
        for sample in self.receiving.pop(sequence):
            if sample.finish_reason is None:
                self.block_manager.commit(sample, sample.num_prompt_tokens)
                sample.awaits_kv = False
                self.running[sample] = None

    def park(self, sequence: Sequence, step: Schedule, media: list[int]) -> None:
        """Remove *sequence* from the step and the queues until resume(): it lacks the pixels of *media*.

        If a step in flight computes it, it is only removed from the step; the next one parks it.
        """
        step.chunks.pop(sequence, None)
        if sequence.num_steps_in_flight:
            step.missing_images.pop(sequence, None)
            return
        self.remove(sequence)
        step.missing_images[sequence] = media
        self.parked[sequence] = None

    def resume(self, sequence: Sequence) -> None:
        """Queue a parked sequence by its arrival: its pixels have come, or its grammar is compiled."""
        del self.parked[sequence]
        self._queue(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free the state of a running sequence between two steps, and queue it again by its arrival."""
        del self.running[sequence]
        self._release(sequence)
        self.encoder_scheduler.unpin(sequence, CLAIMS)
        self._queue(sequence)
        self.num_preemptions += 1

    def _queue(self, sequence: Sequence) -> None:
        self._is_blocked = False
        if sequence.awaits_grammar:
            self.parked[sequence] = None
            return
        bisect.insort(self.waiting, sequence, key=_turn)

    def _unqueue(self, sequence: Sequence) -> None:
        index = bisect.bisect_left(self.waiting, _turn(sequence), key=_turn)
        if index < len(self.waiting) and self.waiting[index] is sequence:
            del self.waiting[index]

    @property
    def can_start_over(self) -> bool:
        """Whether every sequence can be computed again from nothing, and none was at the last `start_over`.

        A sequence whose images came by hash cannot once it has a token: its gateway may have dropped them.
        """
        return all(
            one.arrival > self._newest_preempted and (one.recomputable or not (one.num_generated_tokens or one.index))
            for one in (*self.running, *self.waiting, *self.parked)
        )

    def start_over(self) -> None:
        """Free the state of every sequence between two steps, and empty the caches. No job may be running."""
        self._newest_preempted = max((one.arrival for one in self.running), default=self._newest_preempted)
        for sequence in list(self.running):
            self.preempt(sequence)
        for sequence in (*self.waiting, *self.parked):
            self.encoder_scheduler.unpin(sequence)
        self.reset_caches(prefix=True, media=True)

    def reset_caches(self, *, prefix: bool, media: bool) -> None:
        """Drop KV blocks and encoder outputs that no request uses; watchers of the caches are notified."""
        if prefix:
            self.block_manager.clear()
        if media:
            self.encoder_scheduler.encoder_cache.clear()

    def _release(self, sequence: Sequence) -> None:
        self._is_blocked = False
        self.block_manager.release(sequence)
        self.rows.end(sequence)
        sequence.received_state = b""

    def _admit(self, step: Schedule, remaining: RemainingBudget) -> None:
        if not self.waiting:
            return
        num_kept_rows, num_kept_blocks = self._kept_for_samples()
        free_rows = self.budgets.max_num_seqs - self.num_admitted - num_kept_rows
        while self.waiting and remaining.tokens > 0:
            sequence = self.waiting[0]
            num_rows = _num_rows(sequence)
            if num_rows > free_rows:
                return
            if sequence.awaits_kv:
                if not self._admit_receiving(sequence, step):
                    return
                free_rows -= num_rows
                continue
            if missing_images := self.encoder_scheduler.missing_images(sequence):
                self.park(sequence, step, missing_images)
                continue
            num_kept_blocks = max(num_kept_blocks, self._num_blocks_to_keep(sequence))
            # One block of headroom for each running sequence; otherwise the new sequence would be preempted at once.
            headroom = 0 if sequence.completes_prompt else self.num_admitted + num_kept_blocks
            if not self.block_manager.admit(sequence, headroom):
                return
            free_rows -= num_rows
            del self.waiting[0]
            self.running[sequence] = None
            if sequence.images:
                # A sample may have pins on images whose tokens are already cached.
                self.encoder_scheduler.commit(sequence, 0)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                self.num_cached_tokens += sequence.num_computed_tokens
            self._add_chunk(sequence, step, remaining, later=())

    def _kept_for_samples(self) -> tuple[int, int]:
        """Return how many rows and blocks are kept for samples of admitted prompts."""
        first = [sequence for sequence in self.running if sequence.num_samples_to_come]
        in_front = takewhile(lambda sequence: sequence.completes_prompt, self.waiting)
        others = [*in_front, *(sequence for sequence in self.parked if sequence.completes_prompt)]
        num_rows = sum(sequence.num_samples_to_come for sequence in first) + len(others)
        return num_rows, max(map(self._num_blocks_to_keep, (*first, *others)), default=0)

    def _num_blocks_to_keep(self, sequence: Sequence) -> int:
        """Return the blocks of the largest sample that the prompt of *sequence* waits for before its state is sent."""
        if not (sequence.num_samples_to_come or sequence.completes_prompt):
            return 0
        return self.block_manager.num_sample_blocks(sequence.num_prompt_tokens)

    def _admit_receiving(self, sequence: Sequence, step: Schedule) -> bool:
        """Reserve blocks for all samples of a prompt whose state is received. Return False if there is no room."""
        samples = _live_samples(sequence)
        num_held = self.block_manager.reserve(samples, headroom_blocks=self.num_admitted)
        if num_held is None:
            return False
        del self.waiting[0]
        self.receiving[sequence] = samples
        step.admitted[sequence] = num_held
        return True

    def _continue(self, rest: list[Sequence], step: Schedule, remaining: RemainingBudget) -> None:
        """Add chunks for running sequences that have none in this step yet, mostly prompts."""
        later = deque(sequence for sequence in rest if sequence.num_pending_tokens > 1)
        for sequence in rest:
            if later and later[0] is sequence:
                later.popleft()
            self._add_chunk(sequence, step, remaining, later)

    def _add_chunk(
        self, sequence: Sequence, step: Schedule, remaining: RemainingBudget, later: Iterable[Sequence] | None = None
    ) -> None:
        """Add a chunk of *sequence* to the step, as large as the rest of the budgets allows.

        In all rounds but the last, half of the budget is left if a much shorter prompt is waiting, or is running
        *later* than this one.
        """
        if remaining.tokens == 0:
            return
        num_planned = step.chunks.get(sequence, 0)
        room = num_planned + remaining.tokens
        num_tokens = sequence.num_pending_tokens
        if num_tokens > room:
            shares = later is not None and self._is_before_shorter(sequence, later)
            num_tokens = -(-room // 2) if shares else room
        if num_tokens > 1 or sequence.num_steps_in_flight:
            num_tokens = self.block_manager.chunk(sequence, num_tokens)
        if sequence.images and num_tokens > num_planned:
            num_tokens = self.encoder_scheduler.plan(sequence, num_tokens, step, remaining)
        if num_tokens > num_planned:
            step.chunks[sequence] = num_tokens
            remaining.tokens -= num_tokens - num_planned

    def _is_before_shorter(self, sequence: Sequence, later: Iterable[Sequence]) -> bool:
        """Whether one of the next prompts after *sequence* needs at most half as many tokens."""
        waiting = self.waiting[: min(NUM_LOOKED_AT, self.budgets.max_num_seqs - len(self.running))]
        most = sequence.num_pending_tokens // 2
        return any(
            other.num_pending_tokens <= most or self.block_manager.num_missing_tokens(other) <= most
            for other in islice(chain(later, waiting), NUM_LOOKED_AT)
        )

    def _victims(self) -> Iterator[Sequence]:
        """Yield running sequences in the order in which decodes preempt them. The sort runs when the first is taken."""
        # Sequences that cannot be computed again go last; among the others the newest goes first.
        yield from sorted(self.running, key=lambda victim: (victim.recomputable, victim.arrival), reverse=True)

    def _make_room(self, sequence: Sequence, victims: Iterator[Sequence], step: Schedule) -> bool:
        """Reserve the block for a decode, preempting other sequences. Return False if *sequence* was preempted."""
        while not self.block_manager.extend(sequence):
            victim = next(victims)
            self.preempt(victim)
            step.chunks.pop(victim, None)
            if victim is sequence:
                return False
        return True


def _turn(sequence: Sequence) -> tuple[bool, int]:
    return not sequence.completes_prompt, sequence.arrival


def _live_samples(sequence: Sequence) -> list[Sequence]:
    """Return the unfinished samples of a request whose state is received, by its sample 0."""
    return [sample for sample in (sequence, *sequence.forks) if sample.finish_reason is None]


def _num_rows(sequence: Sequence) -> int:
    """Return how many rows must be free to admit *sequence*, with those of the samples that its prompt needs."""
    if sequence.awaits_kv:
        return len(_live_samples(sequence))
    return 0 if sequence.completes_prompt else 1 + sequence.num_samples_to_come
