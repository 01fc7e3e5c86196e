"""Blocks of layers with a window: none is lost, counted twice or given back too early, and the gateway's count is right."""

from collections import Counter
from math import prod

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import BLOCK, of, run, sequence
from tables import table

from saccade.engine.core.cache_events import CacheFeed, WatchedCaches
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.encoder_scheduler import EncodeCosts
from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.kv.window_blocks import WindowBlocks
from saccade.engine.core.schedule import Budgets
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import ALL, WINDOW, Sequence
from saccade.fleet.index import BlockIndex, Partition
from saccade.models.spec import most_window_blocks
from saccade.protocol.kv_events import KvEvents

PARTITION = Partition(b"model", BLOCK)
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=6 * BLOCK)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["admit", "admit", "grow", "release"]), st.integers(0, 5), PROMPTS), max_size=40
)


def manager(num_blocks: int, num_window_blocks: int, window: int) -> tuple[BlockManager, PagedBlocks, WindowBlocks]:
    paged, in_window = PagedBlocks(num_blocks, BLOCK), WindowBlocks(num_window_blocks, BLOCK, window)
    return BlockManager(paged, window_blocks=in_window), paged, in_window


def check(blocks: BlockManager, alive: list[Sequence]) -> None:
    """References are those of the tables, and each sequence holds what its next token sees."""
    for group in (blocks.paged_blocks, blocks.window_blocks):
        assert group is not None
        tables = [owner.tables[group.group] for owner in alive]
        held = Counter(block for one in tables for block in one.blocks[one.num_passed :])
        assert [held[block] for block in range(group.num_blocks)] == group.references
    assert blocks.window_blocks is not None
    for owner in alive:
        first_seen = max(0, owner.num_computed_tokens - blocks.window_blocks.window + 1)
        assert owner.tables[WINDOW].num_passed * BLOCK <= first_seen


@settings(deadline=None)
@given(EVENTS, st.sampled_from([1, 2, 5, 6, 9, 40]), st.integers(3, 9))
def test_gateway_counts_what_the_worker_resumes(
    events: list[tuple[str, int, list[int]]], window: int, num_window_blocks: int
) -> None:
    blocks, paged, in_window = manager(10, num_window_blocks, window)
    feed, index = CacheFeed(paged, EncoderCache(0), in_window), BlockIndex(1 << 20)
    feed.watch(1, WatchedCaches(blocks=True, images=False))
    index.begin("worker", PARTITION, resumes_at_states=False, window=window)
    alive: list[Sequence] = []
    for number, (event, which, prompt) in enumerate(events):
        if event == "admit":
            owner = of(prompt, (), number)
            for message in feed.take_messages():
                index.take("worker", msgspec.msgpack.decode(message.payload, type=KvEvents))
            keys = owner.block_keys((len(prompt) - 1) // BLOCK, BLOCK)
            known = int(index.overlaps(PARTITION, keys)[0])
            if blocks.admit(owner, headroom_blocks=0):
                assert owner.num_computed_tokens == known * BLOCK
                alive.append(owner)
                while (rest := owner.num_tokens - owner.num_computed_tokens) and in_window.grow(owner, rest, 0):
                    known = len(owner.tables[WINDOW].blocks) * BLOCK
                    blocks.commit(owner, min(owner.num_tokens, known))
        elif alive:
            owner = alive[which % len(alive)]
            if event == "release":
                blocks.release_sequence(owner)
                alive.remove(owner)
            elif owner.num_computed_tokens == owner.num_tokens:
                owner.token_ids.append(which % 2)
                if blocks.extend(owner):
                    blocks.commit(owner, owner.num_tokens)
                else:
                    owner.token_ids.pop()
        check(blocks, alive)
    for owner in alive:
        blocks.release_sequence(owner)
    assert blocks.num_free_blocks == 10
    # A later watcher's snapshot is what the increments have led to.
    for message in feed.take_messages():
        index.take("worker", msgspec.msgpack.decode(message.payload, type=KvEvents))
    feed.watch(2, WatchedCaches(blocks=True, images=False))
    index.begin("late", PARTITION, resumes_at_states=False, window=window)
    for message in feed.take_messages():
        index.take("late", msgspec.msgpack.decode(message.payload, type=KvEvents))
    assert (index.num_blocks("late"), index.num_states("late")) == (
        index.num_blocks("worker"),
        index.num_states("worker"),
    )


def scheduler(in_window: WindowBlocks, tokens: int = 8, seqs: int = 4, *, whole_images: bool = False) -> Scheduler:
    blocks = BlockManager(PagedBlocks(200, BLOCK), window_blocks=in_window)
    budgets = Budgets(seqs, tokens, 64, whole_images=whole_images)
    return Scheduler(budgets, blocks, EncoderCache(10_000), EncodeCosts(prod, lambda *_: 1))


def test_long_sequence_holds_its_window_and_a_chunk() -> None:
    in_window = WindowBlocks(12, BLOCK, 10)
    subject = scheduler(in_window)
    owner = of(range(200), (), 0, max_tokens=40)
    subject.add_sequence(owner)
    most = 0
    while subject.running or subject.waiting:
        run(subject)
        most = max(most, sum(in_window.references))
        held = len(owner.tables[ALL].blocks) - owner.tables[WINDOW].num_passed
        assert not owner.num_generated_tokens or not owner.block_table or held <= in_window.num_seen + 2
    assert owner.num_tokens == 240
    # The blocks before a boundary that it sees, the two of a chunk of 8 tokens, and the one that is being left.
    assert most <= in_window.num_seen + 3
    assert subject.counters.preemptions_total == 0


@table("num_window_blocks", [2 * most_window_blocks(9, BLOCK, 0), 20])
def test_prompts_that_wait_for_each_other_go_on(num_window_blocks: int) -> None:
    """Several prompts of which each could take all blocks: all end."""
    subject = scheduler(WindowBlocks(num_window_blocks, BLOCK, 9), tokens=64, seqs=8)
    finish(subject, [of([number] * 90, (), number, max_tokens=20) for number in range(8)])
    assert subject.counters.preemptions_total == 0


def test_images_that_wait_for_each_other_go_on() -> None:
    """Three prompts hold ten blocks each, and each needs six more for its image: the oldest preempts the newest."""
    subject = scheduler(WindowBlocks(2 * most_window_blocks(41, BLOCK, 24), BLOCK, 41, 24), 16, whole_images=True)
    finish(subject, [sequence(number, length, ((length - 24, 24),)) for number, length in enumerate((240, 120, 60))])
    assert subject.counters.preemptions_total > 0


def finish(subject: Scheduler, owners: list[Sequence]) -> None:
    """Run all of *owners* to their ends."""
    for owner in owners:
        subject.add_sequence(owner)
    for _ in range(2000):
        if not subject.has_work:
            break
        run(subject)
    assert all(owner.num_tokens == owner.max_num_tokens for owner in owners)
    assert subject.block_manager.num_free_blocks == 200


def test_samples_share_the_window_of_their_prompt() -> None:
    """The prompt ends at a block boundary, before which its samples go on."""
    in_window = WindowBlocks(12, BLOCK, 9)
    subject = scheduler(in_window, tokens=64)
    owner = of(range(6 * BLOCK), (), 0, max_tokens=9)
    owner.request = msgspec.structs.replace(owner.request, num_samples=3)
    subject.add_sequence(owner)
    computed = []
    while subject.has_work:
        computed.append(sum(run(subject).chunks.values()))
    # The prompt; the first sample's next token and the block before the boundary for the two others; then tokens.
    assert computed[:3] == [24, 1 + 2 * BLOCK, 3]
