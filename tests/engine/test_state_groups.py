"""A second kind of KV state beside paged blocks: a recurrent one, of snapshots. Contract 4's seam holds for it."""

from collections import OrderedDict
from collections.abc import Sequence as Ordered

import pytest
import scheduling
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import BLOCK, lengths

from saccade.engine.scheduler import Scheduler
from saccade.engine.sequence import Sequence

State = tuple[int, ...]


class Recurrent:
    """A toy recurrent state: its content is the tokens that went through it, so a wrong one shows at once.

    Each running sequence works in one of *slots*. A state can be kept only as it is when a chunk ends, so chunks are
    made to end at every *interval* blocks and at the last full block of what is known at the start.
    """

    def __init__(self, slots: int = 4, interval: int = 2, most_snapshots: int = 8) -> None:
        self.slots = slots
        self.interval = interval
        self.most_snapshots = most_snapshots
        self.working: dict[Sequence, State] = {}
        self.snapshots: OrderedDict[bytes, State] = OrderedDict()
        self.refusals = 0

    def reusable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        return max((n for n in range(1, num_blocks + 1) if keys[n - 1] in self.snapshots), default=0)

    def fits(self, keys: Ordered[bytes], num_tokens: int, headroom_blocks: int) -> bool:
        return len(self.working) < self.slots

    def admit(self, sequence: Sequence, keys: Ordered[bytes], num_tokens: int) -> None:
        self.working[sequence] = self.snapshots[keys[-1]] if keys else ()
        if keys:
            self.snapshots.move_to_end(keys[-1])

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        self.refusals -= 1
        return self.refusals < 0

    def is_boundary(self, sequence: Sequence, stop: int) -> bool:
        last = (sequence.num_prompt_tokens - 1) // BLOCK * BLOCK
        return stop % (self.interval * BLOCK) == 0 or stop == last

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        first = sequence.num_computed_tokens
        return next((n for n in range(1, num_tokens) if self.is_boundary(sequence, first + n)), num_tokens)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        first = sequence.num_computed_tokens
        self.working[sequence] += tuple(sequence.token_ids[first : first + num_tokens])
        assert list(self.working[sequence]) == sequence.token_ids[: first + num_tokens]

    def commit(self, sequence: Sequence, index: int, key: bytes) -> None:
        stop = (index + 1) * BLOCK
        if stop == sequence.num_computed_tokens and self.is_boundary(sequence, stop):
            self.snapshots[key] = self.working[sequence]
            self.snapshots.move_to_end(key)
            while len(self.snapshots) > self.most_snapshots:
                self.snapshots.popitem(last=False)

    def release(self, sequence: Sequence) -> None:
        self.working.pop(sequence, None)


def cached(subject: Scheduler, group: Recurrent, tokens: Ordered[int]) -> int:
    """Answer *tokens* and return how many of them were not computed."""
    owner = scheduling.of(tokens, (), arrival=1, max_tokens=1)
    subject.add(owner)
    while subject.has_work:
        scheduling.run(subject, group.compute)
    assert owner.num_cached_tokens is not None
    return owner.num_cached_tokens


@pytest.mark.parametrize(("interval", "expected"), [(1, 4), (2, 4), (3, 3), (9, 0)])
def test_reuse_is_the_least_of_all_groups_and_at_a_boundary(interval: int, expected: int) -> None:
    group = Recurrent(interval=interval)
    subject = scheduling.scheduler(tokens=100, groups=(group,))
    assert cached(subject, group, range(8 * BLOCK + 2)) == 0
    assert cached(subject, group, [*range(5 * BLOCK - 1), 99, 98, 97]) == expected * BLOCK


def test_the_end_of_a_prompt_is_a_boundary() -> None:
    group = Recurrent(interval=100)
    subject = scheduling.scheduler(tokens=100, groups=(group,))
    assert [cached(subject, group, range(5 * BLOCK + 2)) for _ in range(2)] == [0, 5 * BLOCK]


def test_what_the_paged_group_has_evicted_is_not_reused() -> None:
    group = Recurrent(interval=1, most_snapshots=99)
    subject = scheduling.scheduler(num_blocks=6, groups=(group,))
    cached(subject, group, range(4 * BLOCK))
    cached(subject, group, range(100, 100 + 5 * BLOCK))
    assert cached(subject, group, range(4 * BLOCK)) <= BLOCK
    assert len(group.snapshots) > 6  # it has them still, and they alone are not enough


def test_every_group_must_have_room() -> None:
    group = Recurrent(slots=1)
    subject = scheduling.scheduler(groups=(group,))
    for arrival in (1, 2):
        subject.add(scheduling.sequence(arrival, 4, max_tokens=2))
    steps = []
    while subject.has_work:
        steps.append(set(lengths(scheduling.run(subject, group.compute))))
    assert steps == [{1}, {1}, {2}, {2}]
    assert not group.working


def test_a_group_that_cannot_grow_has_the_newest_retracted() -> None:
    group = Recurrent()
    subject = scheduling.scheduler(groups=(group,))
    for arrival in (1, 2):
        subject.add(scheduling.sequence(arrival, 4, max_tokens=3))
    scheduling.run(subject, group.compute)
    group.refusals = 1
    assert set(lengths(scheduling.run(subject, group.compute))) == {1, 2}  # 2 starts again, with what was kept
    assert subject.num_preemptions == 1
    scheduling.check_holdings(subject)
    while subject.has_work:
        scheduling.run(subject, group.compute)
    assert not group.working


PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 12)), min_size=1, max_size=10
)


@settings(deadline=None, max_examples=80)
@given(PROMPTS, st.integers(1, 3), st.integers(1, 4), st.integers(0, 6), st.integers(3, 20))
def test_every_state_is_its_own_tokens(
    prompts: list[tuple[list[int], int]], slots: int, interval: int, most_snapshots: int, tokens: int
) -> None:
    """`Recurrent.compute` looks at each chunk: whatever was reused, retracted or cut, no token is missing or twice."""
    group = Recurrent(slots, interval, most_snapshots)
    subject = scheduling.scheduler(12, seqs=3, tokens=tokens, groups=(group,))
    for arrival, (prompt, max_tokens) in enumerate(prompts):
        subject.add(scheduling.of(prompt, (), arrival, max_tokens))
    steps = 0
    while subject.has_work:
        assert scheduling.run(subject, group.compute).chunks
        assert len(group.working) == len(subject.running) <= slots
        assert len(group.snapshots) <= most_snapshots
        steps += 1
        assert steps < 3000, "livelock"
    assert scheduling.paged(subject).num_free_blocks == 12
