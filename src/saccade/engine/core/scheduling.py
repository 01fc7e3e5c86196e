"""Chooses the next step's batch. Does not import torch.

Every step includes all decodes, then continues unfinished prefills, then admits waiting sequences. Decodes and prefills
go in order of admission, and waiting sequences in order of their turns. All share a token budget, a patch budget for
the vision encoder, and the available KV blocks. A decode without a free block preempts the running sequence whose turn
comes last: the newest of those with the highest priority number. That sequence is computed again later. A sequence that
cannot be computed again is preempted only after all others. Turns are ordered by priority, if requests have one, and
then by arrival. Sample i of a request counts as though it had come i requests later. Blocks of sliding-window layers
are taken chunk by chunk. If no sequence can go on without more of them, the first by turn also preempts others.

Fairness: a prompt that does not end in this step may leave half of the remaining token budget to later prompts. It does
so if one of these needs at most half as many tokens. Waiting costs the shorter prompt relatively more time than the
longer one. Tokens that the later prompts do not use go to the long prompt after all. Let t be the step's token budget
without its decodes. Consider a prompt of s tokens after k <= 8 prompts that each need twice as many. It has its first
token at most ceil(s / floor(t / 2**k)) steps after its admission. Each of the k prompts that ends meanwhile adds one
step. How long these prompts are does not matter. The first prompt never gets less than half of t. Admission itself
stays in the order of turns.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice, takewhile

from saccade.engine.core.kv.window_blocks import WindowBlocks
from saccade.engine.core.schedule import Schedule, ScheduleBuilder
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Speculation
from saccade.engine.core.step_costs import Allowance

NUM_LOOKED_AT = 8
"""How many later prompts a step examines for shorter ones. After more long prompts, the share would be too small to
help.
"""

LEAST_DRAWS = 16
"""With proposals, a step draws at most as many tokens as there may be sequences, or this many if that is more: the
memory for draws is measured without proposals.
"""


def schedule_step(scheduler: Scheduler, allowance: Allowance | None = None) -> Schedule:
    """Schedule a step: admit and preempt sequences, reserve their blocks, and pin their encoder outputs.

    If a sequence decodes, prompts and images get no more than *allowance*.
    """
    return _StepScheduler(scheduler, allowance).schedule()


class _StepScheduler:
    """Chooses the work for one step of *scheduler*."""

    def __init__(self, scheduler: Scheduler, allowance: Allowance | None) -> None:
        budgets = scheduler.budgets
        self._allowance = allowance
        self._scheduler = scheduler
        self._builder = ScheduleBuilder(budgets.max_num_batched_tokens)
        self._starved: list[Sequence] = []

    def schedule(self) -> Schedule:
        scheduler, builder = self._scheduler, self._builder
        ready = [sequence for sequence in scheduler.running if not sequence.waits_for_commit]
        decodes = [sequence for sequence in ready if sequence.num_pending_tokens == 1]
        # Answers that wait for the step in flight have no token in this step, but their next one comes after it.
        is_awaited = any(one.is_decoding and one.num_expected_tokens < one.max_num_tokens for one in scheduler.running)
        builder.allowance = self._allowance if is_awaited else None
        scheduler.encoder_scheduler.begin_step(builder, is_awaited)
        victims = self._victims()
        for sequence in decodes:
            if sequence in scheduler.running and self._make_room(sequence, victims):
                self._add_chunk(sequence)
        if scheduler.speculation is not None:
            self._speculate(scheduler.speculation, [one for one in decodes if one in builder.chunks])
        self._continue([one for one in ready if one in scheduler.running and one not in builder.chunks])
        self._admit()
        for sequence in [
            owner for owner, num_tokens in builder.chunks.items() if num_tokens < owner.num_pending_tokens
        ]:
            self._add_chunk(sequence)
        for sequence in [sequence for sequence in builder.lacking if sequence in scheduler.running]:
            self._park(sequence)
        if self._starved and not builder.chunks:
            self._relieve(victims)
        # Only the end of a transfer makes room then.
        scheduler.is_blocked = not scheduler.running and bool(scheduler.sending or scheduler.receiving)
        return builder.finish_schedule()

    def _admit(self) -> None:
        scheduler = self._scheduler
        if not scheduler.waiting:
            return
        num_kept_rows, num_kept_blocks = self._kept_for_samples()
        free_rows = scheduler.budgets.max_num_seqs - scheduler.num_admitted - num_kept_rows
        while scheduler.waiting and self._builder.room(scheduler.waiting[0]) > 0:
            sequence = scheduler.waiting[0]
            num_rows = _num_rows(sequence)
            if num_rows > free_rows or (self._starved and not sequence.completes_prompt):
                return
            if sequence.awaits_kv:
                if not self._admit_receiving(sequence):
                    return
                free_rows -= num_rows
                continue
            if lacking := scheduler.encoder_scheduler.lacking_images(sequence):
                self._builder.lacking[sequence] = lacking
                self._park(sequence)
                continue
            num_kept_blocks = max(num_kept_blocks, self._num_blocks_to_keep(sequence))
            # One block of headroom for each running sequence; otherwise the new sequence would be preempted at once.
            headroom = (0, 0) if sequence.completes_prompt else (scheduler.num_admitted, num_kept_blocks)
            if not scheduler.block_manager.admit(sequence, *headroom):
                return
            free_rows -= num_rows
            del scheduler.waiting[0]
            scheduler.running[sequence] = None
            if sequence.images:
                # A sample may have pins on images whose tokens are already cached.
                scheduler.encoder_scheduler.commit(sequence, 0)
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = sequence.num_computed_tokens
                scheduler.counters.cached_tokens_total += sequence.num_computed_tokens
            self._add_chunk(sequence, later=())

    def _kept_for_samples(self) -> tuple[int, int]:
        """Return how many rows and blocks are kept for samples of admitted prompts."""
        scheduler = self._scheduler
        first = [sequence for sequence in scheduler.running if sequence.num_samples_to_come]
        in_front = takewhile(lambda sequence: sequence.completes_prompt, scheduler.waiting)
        others = [*in_front, *(sequence for sequence in scheduler.parked if sequence.completes_prompt)]
        num_rows = sum(sequence.num_samples_to_come for sequence in first) + len(others)
        return num_rows, max(map(self._num_blocks_to_keep, (*first, *others)), default=0)

    def _num_blocks_to_keep(self, sequence: Sequence) -> int:
        """Return how many blocks to keep for a sample that the prompt of *sequence* needs before its state is sent."""
        if not (sequence.num_samples_to_come or sequence.completes_prompt):
            return 0
        return self._scheduler.block_manager.num_sample_blocks(sequence.num_prompt_tokens)

    def _admit_receiving(self, sequence: Sequence) -> bool:
        """Reserve blocks for all samples of a prompt whose state is received. Return False if there is no room."""
        scheduler, samples = self._scheduler, _live_samples(sequence)
        num_cached_blocks = scheduler.block_manager.reserve(samples, headroom_blocks=scheduler.num_admitted)
        if num_cached_blocks is None:
            return False
        del scheduler.waiting[0]
        scheduler.receiving[sequence] = samples
        self._builder.admitted[sequence] = num_cached_blocks
        return True

    def _continue(self, rest: list[Sequence]) -> None:
        """Add chunks for running sequences, mostly prompts, that have none in this step yet."""
        later = deque(sequence for sequence in rest if sequence.num_pending_tokens > 1)
        for sequence in rest:
            if later and later[0] is sequence:
                later.popleft()
            self._add_chunk(sequence, later)

    def _add_chunk(self, sequence: Sequence, later: Iterable[Sequence] | None = None) -> None:
        """Add a chunk of *sequence* to the step, as large as the remaining budgets allow.

        If a much shorter prompt waits or comes *later*, leave half of the budget. The last round passes no *later*, and
        leaves nothing.
        """
        builder, scheduler = self._builder, self._scheduler
        left = builder.room(sequence)
        if left <= 0:
            return
        num_planned = builder.chunks.get(sequence, 0)
        room = num_planned + left
        num_tokens = sequence.num_pending_tokens
        if num_tokens > room:
            shares = later is not None and self._is_before_shorter(sequence, later)
            num_tokens = -(-room // 2) if shares else room
        if sequence.num_steps_in_flight and scheduler.block_manager.awaits_tokens(sequence, num_tokens):
            return
        if sequence.images and num_tokens > num_planned:
            num_tokens = scheduler.encoder_scheduler.schedule_images(sequence, num_tokens, builder)
            # Next to decodes, the images leave fewer tokens.
            num_tokens = min(num_tokens, num_planned + builder.room(sequence))
            if scheduler.budgets.whole_images:
                num_tokens = _with_whole_images(sequence, num_tokens)
        if num_tokens > num_planned and scheduler.block_manager.window_blocks is not None:
            num_tokens = self._grow(scheduler.block_manager.window_blocks, sequence, num_tokens)
        if num_tokens > num_planned:
            builder.chunks[sequence] = num_tokens
            builder.tokens -= num_tokens - num_planned
            if sequence.num_pending_tokens > 1:
                builder.num_prompt_tokens += num_tokens - num_planned

    def _grow(self, window: WindowBlocks, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of the next *num_tokens* fit into blocks of *window*.

        If images must be whole, an image fits entirely or not at all.

        Some blocks are left for other sequences' next tokens, and for samples that are still to come.
        """
        is_starved, headroom = sequence in self._starved, 0
        if not sequence.completes_prompt:
            headroom = min(self._kept_for_samples()[1], window.most_of_one)
            headroom += 0 if is_starved else self._scheduler.num_admitted - 1
        num_granted = window.grow(sequence, num_tokens, headroom)
        if num_granted < num_tokens and self._scheduler.budgets.whole_images:
            num_whole = _with_whole_images(sequence, num_granted)
            num_granted = num_whole if num_whole <= num_granted else 0
        if not (num_granted or is_starved):
            self._starved.append(sequence)
        return num_granted

    def _relieve(self, victims: Iterator[Sequence]) -> None:
        """Let the first sequence that lacks blocks of sliding-window layers go on; preempt others if necessary."""
        scheduler = self._scheduler
        running = [sequence for sequence in self._starved if sequence in scheduler.running]
        if not running or any(sequence.num_steps_in_flight for sequence in scheduler.running):
            return
        first = min(running, key=lambda sequence: sequence.turn)
        self._add_chunk(first)
        for victim in victims:
            if first in self._builder.chunks:
                return
            if victim is not first and victim in scheduler.running:
                scheduler.preempt(victim)
                self._add_chunk(first)

    def _speculate(self, speculation: Speculation, decodes: list[Sequence]) -> None:
        """Add proposals to the chunks of *decodes* as far as the budget and free blocks allow.

        Proposals never preempt a sequence.
        """
        scheduler, builder = self._scheduler, self._builder
        most_draws = max(scheduler.budgets.max_num_seqs, LEAST_DRAWS)
        room = min(builder.tokens, most_draws - len(scheduler.running) - len(scheduler.waiting))
        prices = speculation.times.prices(len(decodes), len(decodes))
        for sequence in decodes:
            proposal = speculation.proposal(sequence, room, prices)
            num_proposed = 0 if proposal is None else len(proposal.token_ids)
            if proposal is None or scheduler.block_manager.awaits_tokens(sequence, 1 + num_proposed):
                continue  # A state that is kept for others must not contain proposals.
            extend = scheduler.block_manager.extend
            if extend(sequence, num_proposed + speculation.num_drafted) or extend(sequence, num_proposed):
                builder.proposals[sequence] = proposal
                builder.chunks[sequence] += num_proposed
                builder.tokens -= num_proposed
                room -= num_proposed
                prices = speculation.times.prices(len(decodes), prices.num_tokens + num_proposed)

    def _is_before_shorter(self, sequence: Sequence, later: Iterable[Sequence]) -> bool:
        """Whether one of the next prompts after *sequence* needs at most half as many tokens."""
        scheduler = self._scheduler
        waiting = scheduler.waiting[: min(NUM_LOOKED_AT, scheduler.budgets.max_num_seqs - len(scheduler.running))]
        most = sequence.num_pending_tokens // 2
        return any(
            other.num_pending_tokens <= most or scheduler.block_manager.num_missing_tokens(other) <= most
            for other in islice(chain(later, waiting), NUM_LOOKED_AT)
        )

    def _victims(self) -> Iterator[Sequence]:
        """Yield running sequences in the order in which decodes preempt them.

        They are sorted when the first is taken.
        """
        # Sequences that cannot be computed again go last; among the others the last by turn goes first.
        running = self._scheduler.running
        yield from sorted(running, key=lambda victim: (victim.recomputable, victim.turn), reverse=True)

    def _make_room(self, sequence: Sequence, victims: Iterator[Sequence]) -> bool:
        """Reserve the block for a decode, preempting other sequences. Return False if *sequence* was preempted."""
        while not self._scheduler.block_manager.extend(sequence):
            victim = next(victims)
            self._scheduler.preempt(victim)
            self._builder.chunks.pop(victim, None)
            if victim is sequence:
                return False
        return True

    def _park(self, sequence: Sequence) -> None:
        """Park a sequence that lacks pixels. If a step in flight computes it, a later step parks it."""
        self._builder.chunks.pop(sequence, None)
        if sequence.num_steps_in_flight:
            del self._builder.lacking[sequence]
        else:
            self._scheduler.park(sequence)


def _with_whole_images(sequence: Sequence, num_tokens: int) -> int:
    """Return *num_tokens* for the next chunk, adjusted so that the chunk does not end inside an image."""
    start = sequence.num_launched_tokens
    last = start + num_tokens - 1
    for run, _ in sequence.media_between(last, last + 1) if num_tokens else ():
        end = run.start + run.length
        if end > last + 1:
            return run.start - start if run.start > start else end - start
    return num_tokens


def _live_samples(sequence: Sequence) -> list[Sequence]:
    """Return the unfinished samples of a request whose state is received; *sequence* is its sample 0."""
    return [sample for sample in (sequence, *sequence.forks) if sample.finish_reason is None]


def _num_rows(sequence: Sequence) -> int:
    """Return how many rows must be free to admit *sequence*, including rows for the samples that its prompt needs."""
    if sequence.awaits_kv:
        return len(_live_samples(sequence))
    return 0 if sequence.completes_prompt else 1 + sequence.num_samples_to_come
