"""Scheduler, blocks and encoder cache together, in any order of events: no step without work, nothing lost or kept."""

from typing import Any

import scheduling
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduling import FEATURE_BYTES, check_holdings, paged

from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step_costs import Allowance
from saccade.protocol.media import MediaItem
from saccade.protocol.output import FinishReason

MOST_STEPS = 3000
PARTS = st.lists(
    st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.tuples(st.integers(1, 6), st.sampled_from("ab"))),
    min_size=1,
    max_size=4,
)
"""Few tokens and few images, so that prefixes and encoder outputs are shared often."""

LEAST = st.integers(1, 12)


class Machine(RuleBasedStateMachine):
    """Clients come, leave and are preempted; every step is checked by `scheduling.run`."""  # [eng] 25, 26, 27

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Sequence] = []
        self.num_arrived = 0

    @initialize(
        num_blocks=st.integers(14, 20),
        seqs=st.integers(1, 4),
        tokens=st.integers(4, 24),
        patches=st.integers(1, 30),
        cache=st.sampled_from((0, FEATURE_BYTES, 10 * FEATURE_BYTES)),
        layers=st.integers(1, 4),
    )
    def start(self, num_blocks: int, seqs: int, tokens: int, patches: int, cache: int, layers: int) -> None:
        costs = scheduling.encode_costs(layers)
        self.subject = scheduling.scheduler(num_blocks, seqs, tokens, patches, encoder_cache_bytes=cache, costs=costs)

    @rule(parts=PARTS, max_tokens=st.integers(1, 6))
    def arrive(self, parts: list[Any], max_tokens: int) -> None:
        token_ids: list[int] = []
        media: list[MediaItem] = []
        for part in parts:
            if isinstance(part, list):
                token_ids += part
            else:
                tokens, content = part
                media.append(scheduling.image(len(token_ids), tokens, content.encode()))
                token_ids += [7] * tokens
        self.num_arrived += 1
        owner = scheduling.of(token_ids, tuple(media), self.num_arrived, max_tokens)
        self.alive.append(owner)
        self.subject.add_sequence(owner)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        owner = self.alive.pop(which % len(self.alive))
        self.subject.end_sequence(owner, FinishReason.ABORT)
        assert not owner.block_table
        assert not any(image.pins for image in owner.images)

    @precondition(lambda self: self.alive and self.subject.running)
    @rule(which=st.integers(0, 99))
    def preempt(self, which: int) -> None:
        self.subject.preempt(list(self.subject.running)[which % len(self.subject.running)])
        arrivals = [owner.arrival for owner in self.subject.waiting]
        assert arrivals == sorted(arrivals)

    @rule(steps=st.integers(1, 4), allowance=st.none() | st.builds(Allowance, LEAST, st.integers(1, 200), LEAST))
    def work(self, steps: int, allowance: Allowance | None) -> None:
        for _ in range(steps):
            self.step(allowance)

    def step(self, allowance: Allowance | None = None) -> None:
        had_work = bool(self.alive)
        assert self.subject.has_work == had_work
        step = scheduling.run(self.subject, allowance=allowance)
        assert bool(step.chunks) or not had_work, "a step without work"
        self.alive = [*self.subject.running, *self.subject.waiting]

    @invariant()
    def holdings_are_those_of_the_unfinished(self) -> None:
        if hasattr(self, "subject"):
            check_holdings(self.subject)
            self.subject.encoder_scheduler.abandon_unpinned()
            cache = self.subject.encoder_scheduler.encoder_cache
            assert cache.used_bytes <= max(cache.budget_bytes, FEATURE_BYTES * len(set(cache.pins)))

    def teardown(self) -> None:
        if not hasattr(self, "subject"):
            return
        for _ in range(MOST_STEPS):
            if not self.subject.has_work:
                break
            self.step()
        assert not self.subject.has_work, "livelock"
        assert paged(self.subject).num_free_blocks == paged(self.subject).num_blocks
        assert not self.subject.encoder_scheduler.encoder_cache.pins
        assert not self.subject.encoder_scheduler.has_unpinned


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
