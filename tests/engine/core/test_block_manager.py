"""Paged blocks: invariants under any order of events."""

import copy
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step_builder import Rows, table_changes
from saccade.identity.blocks import block_keys, root_key
from saccade.models.positions import MultimodalPositions
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK = 4
ROOT = root_key(b"model", b"")


def sequence(token_ids: list[int], media: tuple[MediaItem, ...] = (), arrival: int = 0) -> Sequence:
    request = EngineRequest(
        request_id=str(arrival), token_ids=token_ids, sampling=SamplingParams(max_tokens=9), media=media
    )
    return Sequence(0, request, arrival, 0, ROOT, MultimodalPositions([]))


def manager(num_blocks: int = 8) -> tuple[BlockManager, PagedBlocks]:
    paged = PagedBlocks(num_blocks, BLOCK)
    return BlockManager(paged), paged


def check(paged: PagedBlocks, alive: list[Sequence]) -> None:
    """No block is lost or counted twice; references are exactly those of the tables; every stored key has its block."""
    tables = Counter(block for owner in alive for block in owner.block_table)
    assert [tables[block] for block in range(paged.num_blocks)] == paged.references
    # A copy gives up every block that no table names; then the stored keys are those of the tables.
    paged = copy.deepcopy(paged)
    keys_before = [event.key for event in paged.snapshot()]
    rest = sequence([])
    assert paged.extend(rest, paged.num_free_blocks * BLOCK)
    assert sorted([*rest.block_table, *tables]) == list(range(paged.num_blocks))
    block_of = {}
    for owner in alive:
        keys = owner.block_keys(owner.num_computed_tokens // BLOCK, BLOCK)
        block_of.update(zip(keys, owner.block_table, strict=False))
        twin = sequence([])
        paged.admit(twin, keys, len(keys) * BLOCK)
        assert twin.block_table == owner.block_table[: len(keys)]
    assert {event.key for event in paged.snapshot()} == set(block_of)
    assert {key for key in keys_before if paged.reusable([key], 1)} == set(block_of)
    assert len(set(block_of.values())) == len(block_of)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK)
EVENTS = st.lists(st.tuples(st.sampled_from(["admit", "grow", "release"]), st.integers(0, 5), PROMPTS), max_size=40)


@settings(deadline=None)
@given(EVENTS)
def test_blocks_balance_after_any_events(events: list[tuple[str, int, list[int]]]) -> None:
    blocks, paged = manager()
    alive: list[Sequence] = []
    for number, (event, which, prompt) in enumerate(events):
        if event == "admit":
            owner = sequence(prompt, arrival=number)
            if blocks.admit(owner, headroom_blocks=0):
                assert owner.num_computed_tokens < owner.num_tokens
                alive.append(owner)
                blocks.commit(owner, owner.num_tokens)
        elif alive:
            owner = alive[which % len(alive)]
            if event == "release":
                blocks.release_sequence(owner)
                alive.remove(owner)
            else:
                owner.token_ids.append(which % 2)
                if blocks.extend(owner):
                    blocks.commit(owner, owner.num_tokens)
                else:
                    owner.token_ids.pop()
        check(paged, alive)
        for owner in alive:  # what a running sequence has computed is stored as a whole chain
            keys = owner.block_keys(owner.num_computed_tokens // BLOCK, BLOCK)
            assert paged.reusable(keys, len(keys)) == len(keys)
    for owner in alive:
        blocks.release_sequence(owner)
    check(paged, [])


@table("length", [1, 3, 4, 5, 8, 9, 12])
def test_last_token_is_always_computed(length: int) -> None:  # E6
    blocks, _ = manager()
    for _ in range(2):
        owner = sequence(list(range(length)))
        assert blocks.admit(owner, headroom_blocks=0)
        cached = owner.num_computed_tokens
        blocks.commit(owner, length)
        blocks.release_sequence(owner)
    assert cached == BLOCK * ((length - 1) // BLOCK)


def test_blocks_filled_by_decode_are_reused() -> None:
    blocks, _ = manager()
    owner = sequence([1, 2, 3])
    blocks.admit(owner, headroom_blocks=0)
    for token in (4, 5, 6, 7, 8, 9):
        blocks.commit(owner, owner.num_tokens)
        owner.token_ids.append(token)
        blocks.extend(owner)
    blocks.release_sequence(owner)
    follow_up = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
    blocks.admit(follow_up, headroom_blocks=0)
    assert follow_up.num_computed_tokens == 8


def test_leaves_are_evicted_first() -> None:
    blocks, _ = manager(4)
    first = sequence(list(range(12)))
    blocks.admit(first, headroom_blocks=0)
    blocks.commit(first, 12)
    blocks.release_sequence(first)
    other = sequence([50] * 8)  # needs the one free block and evicts one
    blocks.admit(other, headroom_blocks=0)
    again = sequence([*range(8), 99])
    keys = again.block_keys(2, BLOCK)
    assert blocks.paged_blocks.reusable(keys, 2) == 2


def test_equal_blocks_computed_at_once_become_one() -> None:  # [eng] 30
    blocks, paged = manager()
    twins = [sequence(list(range(9)), arrival=number) for number in range(2)]
    for twin in twins:
        blocks.admit(twin, headroom_blocks=0)
    for twin in twins:
        blocks.commit(twin, 8)
    assert twins[0].block_table[:2] == twins[1].block_table[:2]
    assert twins[0].block_table[2] != twins[1].block_table[2]
    check(paged, twins)


def test_table_changes_include_folded_blocks() -> None:  # [eng] 30
    blocks, _ = manager()
    rows = Rows(2)
    twins = [sequence(list(range(9)), arrival=number) for number in range(2)]
    told: list[list[int]] = []
    for twin in twins:
        blocks.admit(twin, headroom_blocks=0)
        rows.start_row(twin)
        (change,) = table_changes([twin])
        told.append(list(change.blocks))
    for twin in twins:
        blocks.commit(twin, 8)
    for twin, row in zip(twins, told, strict=True):
        for change in table_changes([twin]):
            row[change.start :] = change.blocks
        assert row == list(twin.block_table)


def test_images_share_no_block_past_the_first_placeholder() -> None:  # B3, E7
    def keys(content: bytes) -> list[bytes]:
        item = MediaItem(
            modality="image", content_hash=content * 32, grid=(1, 2, 8), spans=(Span(6, 4),), pixel_shape=(16, 768)
        )
        owner = sequence([7] * 18, (item,))
        assert owner.block_keys(4, BLOCK) == block_keys(ROOT, owner.token_ids, owner.runs, BLOCK)
        return owner.block_keys(4, BLOCK)

    equal = [a == b for a, b in zip(keys(b"a"), keys(b"b"), strict=True)]
    assert equal == [True, False, False, False]  # the image starts in block 1
