"""The scheduler with integers for tensors: order, budgets, fairness, progress."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import FEATURE_BYTES, check_holdings, encode_costs, lengths, of, paged, run, scheduler, sequence

from saccade.engine.core.scheduling import schedule_step
from saccade.engine.core.sequence import Sequence
from saccade.errors import InternalError, QueueFull
from saccade.models.positions import MultimodalPositions
from saccade.protocol.output import FinishReason


def test_decodes_and_prefill_chunks_share_a_step() -> None:
    subject = scheduler()
    subject.add_sequence(sequence(1, 3))
    subject.add_sequence(sequence(2, 40))
    assert [lengths(run(subject)) for _ in range(3)] == [{1: 3, 2: 13}, {1: 1, 2: 15}, {1: 1, 2: 12}]


def test_first_come_first_served() -> None:  # [eng] 42
    subject = scheduler(seqs=2)
    for arrival in (9, 10, 11):  # as text, which ids are, they are in another order
        subject.add_sequence(sequence(arrival, 10))
    assert lengths(run(subject)) == {9: 10, 10: 6}
    assert lengths(run(subject)) == {9: 1, 10: 4}
    assert [owner.arrival for owner in subject.waiting] == [11]


def test_lower_priorities_come_first_and_equal_ones_by_arrival() -> None:  # [eng] 42
    subject = scheduler(seqs=1)
    subject.add_sequence(sequence(1, 4, max_tokens=1))
    run(subject)
    for arrival, priority in ((2, 1), (3, msgspec.UNSET), (4, -5), (5, 0), (6, -5), (7, 1)):
        subject.add_sequence(sequence(arrival, 4, max_tokens=1, priority=priority))
    assert [owner for _ in range(6) for owner in lengths(run(subject))] == [4, 6, 3, 5, 2, 7]


def test_of_running_sequences_the_last_by_priority_is_preempted_first() -> None:
    subject = scheduler(num_blocks=5, seqs=3)
    subject.add_sequence(sequence(1, 7, max_tokens=6, priority=3))
    subject.add_sequence(sequence(2, 7, max_tokens=6, priority=-3))
    ended: list[int] = []
    while subject.has_work:
        before = {one.arrival for one in (*subject.running, *subject.waiting)}
        run(subject)
        ended += before - {one.arrival for one in (*subject.running, *subject.waiting)}
    assert (subject.counters.preemptions_total, ended) == (1, [2, 1])
    check_holdings(subject)


def test_chunk_stops_before_an_image_over_the_budget() -> None:  # D4, [eng] 25
    subject = scheduler(tokens=100, patches=64)
    subject.add_sequence(sequence(1, 40, ((2, 10), (20, 10))))
    step = run(subject)
    assert lengths(step) == {1: 20}
    assert sum(key.grid[1] * key.grid[2] for key in step.encode) == 40
    assert lengths(run(subject)) == {1: 20}


def test_oversize_image_runs_alone() -> None:  # [eng] 25
    subject = scheduler(tokens=100, patches=64)
    subject.add_sequence(sequence(1, 30, ((0, 10),), max_tokens=1))
    subject.add_sequence(sequence(2, 60, ((0, 50),), max_tokens=1))
    subject.add_sequence(sequence(3, 30, ((0, 10),), max_tokens=1))
    assert [set(lengths(run(subject))) for _ in range(3)] == [{1}, {2}, {3}]


def test_encoding_within_steps_leaves_time_to_decode() -> None:  # D4
    """A quarter of the budget of 64 patches; larger images go on layer by layer."""
    subject = scheduler(tokens=1000, seqs=8, patches=64, costs=encode_costs(num_layers=4))
    subject.add_sequence(sequence(1, 4, max_tokens=12))
    run(subject)
    for arrival, tokens in ((2, 2), (3, 2), (4, 1), (5, 12), (6, 4), (7, 4)):
        subject.add_sequence(sequence(arrival, tokens, ((0, tokens),), max_tokens=1))
    steps = [run(subject) for _ in range(8)]
    begun = [[key.content_hash[0] for key in step.encode] for step in steps]
    assert begun == [[2, 3], [4, 5], [6], [], [], [7], [], []]
    encoded = [[key.content_hash[0] for key in step.encoded] for step in steps]
    assert encoded == [[2, 3], [4], [], [], [5], [6], [7], []]
    assert all(lengths(step)[1] == 1 for step in steps)
    # Without decodes the whole budget is free again.
    while subject.has_work:
        run(subject)
    for arrival in (8, 9, 10, 11):
        subject.add_sequence(sequence(arrival, 4, ((0, 4),), max_tokens=1))
    assert len(run(subject).encode) == 4


def test_equal_images_are_encoded_once() -> None:  # B4, D3, [eng] 5
    subject = scheduler(tokens=100, seqs=4)
    for _ in range(2):
        subject.add_sequence(sequence(1, 20, ((3, 8),)))
    assert len(run(subject).encode) == 1
    subject.add_sequence(sequence(1, 20, ((3, 8),)))
    assert len(run(subject).encode) == 0


def test_prefix_cached_image_is_not_encoded() -> None:  # [eng] 23
    subject = scheduler()
    subject.add_sequence(sequence(1, 14, ((1, 4),), max_tokens=1))
    run(subject)
    subject.encoder_scheduler.encoder_cache.clear()
    subject.add_sequence(sequence(1, 14, ((1, 4),), max_tokens=1))
    step = run(subject)
    assert lengths(step) == {1: 2}
    assert step.encode == {}


def test_newest_is_preempted_and_comes_back_first() -> None:
    subject = scheduler(num_blocks=5, seqs=3)
    for arrival in (1, 2):
        subject.add_sequence(sequence(arrival, 7, max_tokens=6))
    subject.add_sequence(sequence(3, 4, max_tokens=1))
    seen = []
    while subject.has_work:
        seen.append(set(lengths(run(subject))))
    preempted = next(step for step, who in enumerate(seen) if who == {1})
    back = next(step for step in range(preempted, len(seen)) if 2 in seen[step])
    assert subject.counters.preemptions_total == 1
    assert next(step for step, who in enumerate(seen) if 3 in who) >= back  # 3 came behind 2 and does not overtake it


def test_each_sequence_starts_over_once() -> None:
    subject = scheduler(seqs=2)
    for arrival in (1, 2, 3):
        subject.add_sequence(sequence(arrival, 6, max_tokens=8))
    run(subject)
    assert subject.can_start_over
    subject.start_over()
    subject.block_manager.paged_blocks.clear()
    assert [one.arrival for one in subject.waiting] == [1, 2, 3]
    assert paged(subject).num_free_blocks == 100
    assert lengths(run(subject)) == {1: 7, 2: 7}
    while subject.running:
        assert subject.can_start_over == all(one.arrival > 2 for one in subject.running)
        run(subject)


def test_an_image_by_hash_keeps_its_sequence_from_starting_over() -> None:
    subject = scheduler()
    subject.add_sequence(without := sequence(1, 8, ((0, 2),), inline=None))
    subject.encoder_scheduler.encoder_cache.begin_image(without.images[0].key, FEATURE_BYTES)
    subject.encoder_scheduler.encoder_cache.complete(without.images[0].key)
    assert subject.can_start_over  # it has no token yet: its gateway would be asked
    run(subject)
    assert not subject.can_start_over


def test_sequences_that_cannot_be_recomputed_are_preempted_last() -> None:
    subject = scheduler(num_blocks=5)
    subject.add_sequence(sequence(1, 8, max_tokens=5))
    subject.add_sequence(without := sequence(2, 8, ((0, 2),), max_tokens=5, inline=None))
    subject.encoder_scheduler.encoder_cache.begin_image(without.images[0].key, FEATURE_BYTES)
    subject.encoder_scheduler.encoder_cache.complete(without.images[0].key)
    while not subject.counters.preemptions_total:
        run(subject)
    assert [owner.arrival for owner in subject.waiting] == [1]


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(0, 2), st.integers(1, 5), st.integers(1, 6)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=150)
@given(ARRIVALS, st.integers(10, 14), st.integers(3, 20), st.integers(4, 24))
def test_everyone_finishes_within_the_budgets(
    arrivals: list[tuple[int, int, int, int, int]], num_blocks: int, tokens: int, patches: int
) -> None:
    subject = scheduler(num_blocks, seqs=3, tokens=tokens, patches=patches)
    steps = 0
    pending = list(arrivals)
    while pending or subject.has_work:
        if pending and steps >= pending[0][0]:
            _, text, count, size, answer = pending.pop(0)
            spans = tuple((index * size, size) for index in range(count))
            subject.add_sequence(sequence(len(arrivals) - len(pending), text + count * size, spans, answer))
        had_work = subject.has_work
        assert bool(run(subject).chunks) == had_work, "a step without work"
        steps += 1
        assert steps < 2000, "livelock"
    check_holdings(subject)
    assert paged(subject).num_free_blocks == num_blocks


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_removed_sequences_do_no_work(state: str) -> None:  # [eng] 27
    subject = scheduler()
    owner = sequence(1, 40, ((20, 4),))
    subject.add_sequence(owner)
    if state == "running":
        run(subject)
    subject.end_sequence(owner, FinishReason.ABORT)
    assert not subject.has_work
    assert schedule_step(subject).chunks == {}


def test_full_queue_refuses() -> None:
    subject = scheduler(seqs=1)
    for arrival in range(1, 3):
        subject.add_sequence(sequence(arrival, 4))
    subject.budgets = replace(subject.budgets, max_num_waiting=2)
    with pytest.raises(QueueFull):
        subject.check_queue()
    run(subject)
    subject.check_queue()


def test_prompt_tokens_that_wait_are_counted() -> None:  # F11
    subject = scheduler(seqs=1)
    first, received, samples = sequence(1, 20), sequence(2, 40), of([3] * 30, (), 3, num_samples=4)
    received.awaits_kv = True
    subject.add_sequence(first)
    assert subject.load().num_waiting_tokens == 20
    run(subject)
    assert subject.load().num_waiting_tokens == 20 - 16
    subject.add_sequence(samples)
    assert subject.load().num_waiting_tokens == 4 + 30
    subject.waiting.append(received)  # its prompt is computed by the prefill worker
    assert subject.load().num_waiting_tokens == 4 + 30
    subject.waiting.remove(received)
    while subject.has_work:
        run(subject)
    assert subject.load().num_waiting_tokens == 0


def with_samples(arrival: int, num_samples: int, num_at_once: int | msgspec.UnsetType = msgspec.UNSET) -> Sequence:
    return of([arrival] * 3, (), arrival, 5, num_samples, num_at_once)


def test_samples_of_several_requests_take_rows_in_turn() -> None:
    subject = scheduler(seqs=2)
    for arrival, num_samples in ((1, 4), (2, 3), (3, 1)):
        subject.add_sequence(with_samples(arrival, num_samples))
    began: list[tuple[int, int]] = []
    while subject.has_work:
        began += [(one.arrival, one.index) for one in run(subject).chunks if (one.arrival, one.index) not in began]
    assert began == [(1, 0), (2, 0), (1, 1), (3, 0), (2, 1), (1, 2), (2, 2), (1, 3)]


@pytest.mark.parametrize("ends", ["by itself", "aborted", "aborted while it waits", "with its request"])
def test_no_more_samples_run_at_once_than_their_request_may_have(ends: str) -> None:
    subject = scheduler(seqs=8)
    subject.add_sequence(first := with_samples(1, 9, num_at_once=3))
    run(subject)
    if ends == "aborted":
        subject.end_sequence(first, FinishReason.ABORT)
    elif ends == "aborted while it waits":
        for waiting in list(subject.parked)[:2]:
            subject.end_sequence(waiting, FinishReason.ABORT)
    elif ends == "with its request":
        subject.fail(first, InternalError("The model failed."))
    most = 0
    while subject.has_work:
        assert len(run(subject).chunks) <= 3
        most = max(most, len(subject.running))
    assert most == (0 if ends == "with its request" else 3)
    assert (subject.parked, subject.requests[0]) == ({}, {})
    check_holdings(subject)


def test_few_requests_with_many_samples_leave_places_to_wait_to_others() -> None:
    subject = scheduler(seqs=1, num_blocks=400)
    subject.budgets = replace(subject.budgets, max_num_waiting=4)
    subject.add_sequence(with_samples(1, 30))
    run(subject)
    assert len(subject.waiting) == 29
    subject.check_queue()
    subject.add_sequence(with_samples(2, 4))
    subject.add_sequence(with_samples(3, 1))
    subject.check_queue()
    subject.add_sequence(with_samples(4, 1))
    with pytest.raises(QueueFull, match="are waiting at this worker"):
        subject.check_queue()


def test_a_short_prompt_does_not_wait_for_a_long_one_to_end() -> None:
    subject = scheduler(num_blocks=400, tokens=16)
    subject.add_sequence(sequence(1, 1000))
    run(subject)
    subject.add_sequence(sequence(2, 7, max_tokens=1))
    assert lengths(run(subject)) == {1: 9, 2: 7}


def test_equal_prompts_do_not_slow_each_other_down() -> None:
    subject = scheduler(tokens=16)
    for arrival in (1, 2):
        subject.add_sequence(sequence(arrival, 20, max_tokens=1))
    assert [lengths(run(subject)) for _ in range(3)] == [{1: 16}, {1: 4, 2: 12}, {2: 8}]


def test_prompt_counts_as_short_by_its_remaining_tokens() -> None:
    """The tenth turn of a chat is long, but all of it but its end is cached."""
    subject = scheduler(num_blocks=400, tokens=16)
    subject.add_sequence(sequence(2, 100, max_tokens=1))
    while subject.has_work:
        run(subject)
    subject.add_sequence(sequence(1, 150))
    subject.add_sequence(sequence(2, 101, max_tokens=1))
    assert lengths(run(subject)) == {1: 15, 2: 1}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(60, 300), min_size=1, max_size=4), st.integers(1, 40), st.integers(20, 40), st.booleans())
def test_short_prompts_start_soon_and_long_ones_go_on(long: list[int], short: int, tokens: int, late: bool) -> None:
    """The bound that the scheduler's docstring states."""
    subject = scheduler(num_blocks=1000, seqs=8, tokens=tokens)
    for arrival, length in enumerate(long):
        subject.add_sequence(sequence(arrival, length, max_tokens=1000))
    if late:
        run(subject)
    needs = [owner.num_pending_tokens for owner in (*subject.running, *subject.waiting)]
    subject.add_sequence(newcomer := sequence(99, min(short, *(need // 2 for need in needs)), max_tokens=1))
    steps = 0
    while not newcomer.num_generated_tokens:
        room = tokens - sum(owner.num_pending_tokens == 1 for owner in subject.running)
        in_line = [owner for owner in (*subject.running, *subject.waiting) if owner.num_pending_tokens > 1]
        least = [min(first.num_pending_tokens, room // 2) for first in in_line[:1]]
        steps += 1
        chunks = run(subject).chunks
        assert [chunks[first] for first in in_line[:1]] >= least
    share = max(1, (tokens - len(long)) >> len(long))
    ended = sum(owner.num_generated_tokens > 0 for owner in subject.running)
    assert steps <= -(-newcomer.num_prompt_tokens // share) + ended


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 40),
)
def test_whole_images_are_computed_in_one_chunk(parts: list[tuple[int, int]], seqs: int, tokens: int) -> None:
    """Each part is text and an image after it. No chunk ends inside one, and every prompt ends."""
    images, length = [], 0
    for text, image in parts:
        images.append((length + text, image))
        length += text + image
    subject = scheduler(num_blocks=400, seqs=seqs, tokens=max(tokens, seqs), patches=1000, whole_images=True)
    for arrival in range(seqs):
        subject.add_sequence(sequence(arrival, length + 3, tuple(images)))

    def check(owner: Sequence, num_tokens: int) -> None:
        stop = owner.num_computed_tokens + num_tokens
        assert not any(start < stop < start + count for start, count in images)

    for _ in range(seqs * (length + 10)):
        if subject.has_work:
            run(subject, check)
    assert not subject.has_work


def num_compared(num_sequences: int) -> int:
    """How often sequences are compared with each other in a step that decodes, one that preempts, and all the ends."""

    class Compared(Sequence):
        count = 0
        __hash__ = Sequence.__hash__

        def __eq__(self, other: object) -> bool:
            Compared.count += 1
            return self is other

    subject = scheduler(num_blocks=2 * num_sequences + 2, seqs=num_sequences, tokens=8 * num_sequences)
    for arrival in range(num_sequences):
        owner = sequence(arrival, 4, max_tokens=99)
        subject.add_sequence(Compared(0, owner.request, arrival, 0, arrival.to_bytes(4), MultimodalPositions([])))
    while not subject.counters.preemptions_total:
        run(subject)
    for owner in list(subject.running)[::-1]:
        subject.end_sequence(owner, FinishReason.ABORT)
    return Compared.count


def test_planning_searches_no_list() -> None:
    """So that its cost grows with the sequences, not with their square: a search compares one with many others."""
    assert num_compared(100) <= 2 * 100
