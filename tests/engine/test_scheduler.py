"""The scheduler with integers for tensors: order, budgets, progress."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.block_manager import BlockManager, PagedBlocks
from saccade.engine.encoder_cache import EncoderCache
from saccade.engine.scheduler import Budgets, Schedule, Scheduler
from saccade.engine.sequence import Sequence
from saccade.nn.rope import MultimodalPositions
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK = 4


def sequence(arrival: int, length: int, pictures: tuple[tuple[int, int], ...] = (), max_tokens: int = 4) -> Sequence:
    """A prompt of *length* tokens; pictures are (start, tokens), each different, of 4 patches a token."""
    media = tuple(
        MediaItem(
            modality="image",
            content_hash=bytes([arrival % 256, index]) * 16,
            grid=(1, 2, 2 * tokens),
            spans=(Span(start, tokens),),
            pixel_shape=(4 * tokens, 768),
            inline=b"",
        )
        for index, (start, tokens) in enumerate(pictures)
    )
    request = EngineRequest(
        request_id=str(arrival),
        token_ids=[arrival] * length,
        sampling=SamplingParams(max_tokens=max_tokens),
        media=media,
    )
    return Sequence(0, request, arrival, 0, b"", MultimodalPositions([]))


def scheduler(num_blocks: int = 100, seqs: int = 4, tokens: int = 16, patches: int = 64) -> Scheduler:
    blocks = BlockManager([PagedBlocks(num_blocks, BLOCK)], BLOCK)
    return Scheduler(Budgets(seqs, tokens, patches), blocks, EncoderCache(10_000))


def run(subject: Scheduler) -> Schedule:
    """One step, with the encoder and the network played by this function."""
    step = subject.schedule()
    for key in step.encode:
        subject.encoder_cache.put(key, "features", 1)
    for owner, num_tokens in step.chunks.items():
        first = owner.num_computed_tokens
        for run_, source in owner.media_between(first, first + num_tokens):
            assert source.key in subject.encoder_cache, (run_, "is needed and not encoded")
    subject.commit(step)
    for owner in step.chunks:
        if owner.num_pending_tokens == 0:
            owner.token_ids.append(0)
            if owner.num_generated_tokens >= owner.sampling.max_tokens:
                subject.remove(owner)
    return step


def lengths(step: Schedule) -> dict[int, int]:
    return {owner.arrival: num_tokens for owner, num_tokens in step.chunks.items()}


def test_decodes_and_prefill_chunks_share_a_step() -> None:
    subject = scheduler()
    subject.add(sequence(1, 3))
    subject.add(sequence(2, 40))
    assert [lengths(run(subject)) for _ in range(3)] == [{1: 3, 2: 13}, {1: 1, 2: 15}, {1: 1, 2: 12}]


def test_first_come_first_served() -> None:  # [eng] 42
    subject = scheduler(seqs=2)
    for arrival in (1, 2, 3):
        subject.add(sequence(arrival, 10))
    assert lengths(run(subject)) == {1: 10, 2: 6}
    assert lengths(run(subject)) == {1: 1, 2: 4}
    assert [owner.arrival for owner in subject.waiting] == [3]


def test_chunk_stops_before_a_picture_over_the_budget() -> None:  # D4, [eng] 25
    subject = scheduler(tokens=100, patches=64)
    subject.add(sequence(1, 40, ((2, 10), (20, 10))))
    step = run(subject)
    assert lengths(step) == {1: 20}
    assert sum(key.grid[1] * key.grid[2] for key in step.encode) == 40
    assert lengths(run(subject)) == {1: 20}


def test_oversize_picture_runs_alone() -> None:
    subject = scheduler(tokens=100, patches=64)
    subject.add(sequence(1, 30, ((0, 10),)))
    subject.add(sequence(2, 60, ((0, 50),)))
    subject.add(sequence(3, 30, ((0, 10),)))
    assert [set(lengths(run(subject))) for _ in range(3)] == [{1}, {1, 2}, {1, 2, 3}]


def test_equal_pictures_are_encoded_once() -> None:  # B4, D3
    subject = scheduler(tokens=100, seqs=4)
    for _ in range(2):
        subject.add(sequence(1, 20, ((3, 8),)))
    assert len(run(subject).encode) == 1
    subject.add(sequence(1, 20, ((3, 8),)))
    assert len(run(subject).encode) == 0


def test_prefix_cached_picture_is_not_encoded() -> None:  # [eng] 23
    subject = scheduler()
    subject.add(sequence(1, 14, ((1, 4),), max_tokens=1))
    run(subject)
    subject.encoder_cache.clear()
    subject.add(sequence(1, 14, ((1, 4),), max_tokens=1))
    step = run(subject)
    assert lengths(step) == {1: 2}
    assert step.encode == {}


def test_newest_is_retracted_and_comes_back_first() -> None:
    subject = scheduler(num_blocks=5, seqs=3)
    for arrival in (1, 2):
        subject.add(sequence(arrival, 7, max_tokens=6))
    subject.add(sequence(3, 4, max_tokens=1))
    seen = []
    while subject.has_work:
        seen.append(set(lengths(run(subject))))
    retracted = next(step for step, who in enumerate(seen) if who == {1})
    back = next(step for step in range(retracted, len(seen)) if 2 in seen[step])
    assert subject.num_preemptions == 1
    assert next(step for step, who in enumerate(seen) if 3 in who) >= back  # 3 came behind 2 and does not overtake it


def test_what_cannot_be_recomputed_is_retracted_last() -> None:
    subject = scheduler(num_blocks=5)
    for arrival, pictures in ((1, ()), (2, ((0, 2),))):
        subject.add(sequence(arrival, 8, pictures, max_tokens=5))
    run(subject)
    for source in subject.running[1].sources:
        source._inline = None
    while not subject.num_preemptions:
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
            subject.add(sequence(len(arrivals) - len(pending), text + count * size, spans, answer))
        step = run(subject)
        steps += 1
        assert steps < 2000, "livelock"
        assert sum(step.chunks.values()) <= tokens
        assert len(step.chunks) <= 3
        work = [key.grid[1] * key.grid[2] for key in step.encode]
        assert sum(work) <= patches or len(work) == 1
    assert subject.block_manager.groups[0].num_free_blocks == num_blocks  # type: ignore[attr-defined]
    assert not subject.encoder_cache._pins


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_removed_sequences_do_no_work(state: str) -> None:  # [eng] 27
    subject = scheduler()
    owner = sequence(1, 40, ((20, 4),))
    subject.add(owner)
    if state == "running":
        run(subject)
    subject.remove(owner)
    assert not subject.has_work
    assert subject.schedule().chunks == {}
