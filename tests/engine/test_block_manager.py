"""Blocks: invariants under any order of events, and the seam for other kinds of state."""

from collections import Counter
from collections.abc import Sequence as Ordered

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.block_manager import BlockManager, PagedBlocks
from saccade.engine.sequence import Sequence
from saccade.identity.blocks import block_keys, root_key
from saccade.nn.rope import MultimodalPositions
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK = 4
ROOT = root_key(b"model", b"")


def sequence(token_ids: list[int], media: tuple[MediaItem, ...] = (), arrival: int = 0) -> Sequence:
    request = EngineRequest(
        request_id=str(arrival), token_ids=token_ids, sampling=SamplingParams(max_tokens=9), media=media
    )
    return Sequence(0, request, arrival, 0, ROOT, MultimodalPositions([]))


def manager(num_blocks: int = 8, *more: "Snapshots") -> tuple[BlockManager, PagedBlocks]:
    paged = PagedBlocks(num_blocks, BLOCK)
    return BlockManager([paged, *more], BLOCK), paged


def check(paged: PagedBlocks, alive: list[Sequence]) -> None:
    """No block is lost or counted twice; references are exactly those of the tables; parents outlive children."""
    tables = Counter(block for owner in alive for block in owner.block_table)
    assert [tables[block] for block in range(paged.num_blocks)] == paged.references
    unused = [*paged._free, *paged._cached]
    assert sorted([*unused, *tables]) == list(range(paged.num_blocks))
    assert {block: key for key, block in paged._block_of.items()} == paged._key_of
    assert set(paged._cached) <= set(paged._key_of)
    assert not set(paged._free) & set(paged._key_of)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=3 * BLOCK)
EVENTS = st.lists(st.tuples(st.sampled_from(["admit", "grow", "release"]), st.integers(0, 5), PROMPTS), max_size=40)


@settings(deadline=None)
@given(EVENTS)
def test_invariants(events: list[tuple[str, int, list[int]]]) -> None:
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
                blocks.release(owner)
                alive.remove(owner)
            else:
                owner.token_ids.append(which % 2)
                if blocks.extend(owner):
                    blocks.commit(owner, owner.num_tokens)
                else:
                    owner.token_ids.pop()
        check(paged, alive)
        stored = set(paged._block_of)
        for owner in alive:  # what a running sequence has computed is stored as a whole chain
            assert set(owner.block_keys(owner.num_computed_tokens // BLOCK, BLOCK)) <= stored
    for owner in alive:
        blocks.release(owner)
    check(paged, [])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 12])
def test_last_token_is_always_computed(length: int) -> None:  # E6
    blocks, _ = manager()
    for _ in range(2):
        owner = sequence(list(range(length)))
        assert blocks.admit(owner, headroom_blocks=0)
        cached = owner.num_computed_tokens
        blocks.commit(owner, length)
        blocks.release(owner)
    assert cached == BLOCK * ((length - 1) // BLOCK)


def test_blocks_filled_by_decode_are_reused() -> None:
    blocks, _ = manager()
    owner = sequence([1, 2, 3])
    blocks.admit(owner, headroom_blocks=0)
    for token in (4, 5, 6, 7, 8, 9):
        blocks.commit(owner, owner.num_tokens)
        owner.token_ids.append(token)
        blocks.extend(owner)
    blocks.release(owner)
    follow_up = sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
    blocks.admit(follow_up, headroom_blocks=0)
    assert follow_up.num_computed_tokens == 8


def test_leaves_are_evicted_first() -> None:
    blocks, _ = manager(4)
    first = sequence(list(range(12)))
    blocks.admit(first, headroom_blocks=0)
    blocks.commit(first, 12)
    blocks.release(first)
    other = sequence([50] * 8)  # needs the one free block and evicts one
    blocks.admit(other, headroom_blocks=0)
    again = sequence([*range(8), 99])
    keys = again.block_keys(2, BLOCK)
    assert blocks.groups[0].reusable(keys, 2) == 2


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


def test_pictures_share_no_block_past_the_first_placeholder() -> None:  # B3, E7
    def keys(content: bytes) -> list[bytes]:
        item = MediaItem(
            modality="image", content_hash=content * 32, grid=(1, 2, 8), spans=(Span(6, 4),), pixel_shape=(16, 768)
        )
        owner = sequence([7] * 18, (item,))
        assert owner.block_keys(4, BLOCK) == block_keys(ROOT, owner.token_ids, owner.runs, BLOCK)
        return owner.block_keys(4, BLOCK)

    equal = [a == b for a, b in zip(keys(b"a"), keys(b"b"), strict=True)]
    assert equal == [True, False, False, False]  # the picture starts in block 1


class Snapshots:
    """A toy recurrent state: it can be resumed only behind every *interval* blocks, and room is counted in sequences."""

    def __init__(self, interval: int, room: int = 9) -> None:
        self.interval = interval
        self.room = room
        self.stored: set[bytes] = set()
        self.held: set[int] = set()

    def reusable(self, keys: Ordered[bytes], num_blocks: int) -> int:
        return max((n for n in range(1, num_blocks + 1) if keys[n - 1] in self.stored), default=0)

    def fits(self, keys: Ordered[bytes], num_tokens: int, headroom_blocks: int) -> bool:
        return len(self.held) < self.room

    def admit(self, sequence: Sequence, keys: Ordered[bytes], num_tokens: int) -> None:
        self.held.add(sequence.arrival)

    def extend(self, sequence: Sequence, num_tokens: int) -> bool:
        return True

    def commit(self, sequence: Sequence, index: int, key: bytes) -> None:
        if (index + 1) % self.interval == 0:
            self.stored.add(key)

    def release(self, sequence: Sequence) -> None:
        self.held.discard(sequence.arrival)


@pytest.mark.parametrize(("interval", "expected"), [(1, 5), (2, 4), (3, 3), (7, 0)])
def test_reuse_is_the_least_of_all_groups(interval: int, expected: int) -> None:
    blocks, _ = manager(8, Snapshots(interval))
    for _ in range(2):
        owner = sequence(list(range(5 * BLOCK + 1)))
        assert blocks.admit(owner, headroom_blocks=0)
        cached = owner.num_computed_tokens
        blocks.commit(owner, owner.num_tokens)
        blocks.release(owner)
    assert cached == expected * BLOCK


def test_every_group_must_have_room() -> None:
    blocks, paged = manager(8, Snapshots(1, room=1))
    first, second = sequence([1, 2], arrival=1), sequence([3, 4], arrival=2)
    assert blocks.admit(first, headroom_blocks=0)
    assert not blocks.admit(second, headroom_blocks=0)
    check(paged, [first])
    blocks.release(first)
    assert blocks.admit(second, headroom_blocks=0)
