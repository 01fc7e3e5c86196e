"""The index of what workers hold."""

import pytest

from saccade.identity.blocks import block_keys, root_key
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents, StateRemoved, StateStored
from saccade.routing.index import BYTES_PER_KEY, SWEPT_KEYS, BlockIndex, Partition

HERE = Partition(b"f", 4)
ROOT = root_key(b"f", b"salt")
KEYS = block_keys(ROOT, range(40), (), 4)


def stored(*numbers: int) -> list[KvEvent]:
    return [
        BlockStored(KEYS[number], KEYS[number - 1] if number else ROOT, [], is_first=number == 0) for number in numbers
    ]


def index_of(*events: KvEvent, worker: str = "a", hybrid: bool = False, max_bytes: int = 1 << 20) -> BlockIndex:
    index = BlockIndex(max_bytes)
    index.begin(worker, HERE, resumes_at_states=hybrid)
    index.take(worker, KvEvents(3, list(events), snapshot=True))
    return index


def test_overlap_is_the_longest_held_prefix() -> None:
    index = index_of(*stored(0, 1, 2, 5))
    assert index.overlap("a", HERE, KEYS) == 3
    assert index.overlap("a", HERE, KEYS[:2]) == 2
    assert index.overlap("a", HERE, block_keys(root_key(b"f", b"other"), range(40), (), 4)) == 0  # another tenant
    assert index.overlap("b", HERE, KEYS) == 0


def test_an_orphan_is_dropped_and_counted() -> None:  # E5
    index = BlockIndex(1 << 20)
    index.begin("a", HERE, resumes_at_states=False)
    assert index.take("a", KvEvents(3, stored(1, 2, 0, 1), snapshot=True)) == 2
    assert index.num_blocks("a") == 2
    assert index.overlap("a", HERE, KEYS) == 2
    assert index.overlap("a", HERE, KEYS[2:]) == 0
    assert index.take("a", KvEvents(4, stored(2))) == 0
    assert index.overlap("a", HERE, KEYS) == 3


def test_children_of_a_block_that_left_match_again_when_it_is_back() -> None:
    index = index_of(*stored(0, 1, 2))
    index.take("a", KvEvents(4, [BlockRemoved(KEYS[0])]))
    assert index.overlap("a", HERE, KEYS) == 0
    index.take("a", KvEvents(5, stored(0)))
    assert index.overlap("a", HERE, KEYS) == 3


@pytest.mark.parametrize("other", [Partition(b"g", 4), Partition(b"f", 16)])
def test_partitions_share_nothing(other: Partition) -> None:
    assert index_of(*stored(0, 1)).overlap("a", other, KEYS) == 0


def test_increments_change_what_is_held() -> None:
    index = index_of(*stored(0, 1, 2, 3))
    index.take("a", KvEvents(4, [BlockRemoved(KEYS[2]), *stored(4)]))
    assert index.overlap("a", HERE, KEYS) == 2
    assert index.num_blocks("a") == 4
    index.take("a", KvEvents(5, [*stored(2, 2), BlockRemoved(b"unknown")]))
    assert index.overlap("a", HERE, KEYS) == 5
    assert index.num_bytes == 5 * BYTES_PER_KEY


def test_a_worker_is_exact_after_the_last_piece_of_its_snapshot() -> None:
    index = BlockIndex(1 << 20)
    index.begin("a", HERE, resumes_at_states=False)
    assert not index.is_exact("a")
    index.take("a", KvEvents(7, stored(0), snapshot=True, last=False))
    assert not index.is_exact("a")
    index.take("a", KvEvents(7, stored(1), snapshot=True))
    assert index.is_exact("a")
    assert index.overlap("a", HERE, KEYS) == 2


def test_a_restart_clears() -> None:
    index = index_of(*stored(0, 1))
    index.begin("a", HERE, resumes_at_states=False)
    assert not index.is_exact("a")
    assert index.overlap("a", HERE, KEYS) == index.num_bytes == 0
    index.forget("a")
    index.forget("a")
    assert index.num_blocks("a") == index.num_states("a") == 0


def test_a_hybrid_resumes_only_at_states() -> None:
    index = index_of(*stored(0, 1, 2, 3), StateStored(KEYS[1]), StateStored(KEYS[5]), hybrid=True)
    assert index.overlap("a", HERE, KEYS) == 2
    assert index.num_states("a") == 2
    index.take("a", KvEvents(4, stored(4, 5)))
    assert index.overlap("a", HERE, KEYS) == 6
    assert index.overlap("a", HERE, KEYS[:5]) == 2
    index.take("a", KvEvents(5, [StateRemoved(KEYS[1])]))
    assert index.overlap("a", HERE, KEYS[:5]) == 0


def test_a_full_index_forgets_the_worker_that_filled_it() -> None:
    index = index_of(*stored(0, 1), max_bytes=4 * BYTES_PER_KEY)
    index.begin("b", HERE, resumes_at_states=False)
    assert index.take("b", KvEvents(1, stored(0, 1), snapshot=True)) == 0
    assert index.take("b", KvEvents(2, stored(2))) is None
    assert not index.is_exact("b")
    assert index.is_exact("a")
    assert index.num_bytes == 2 * BYTES_PER_KEY


def test_the_memory_of_a_forgotten_worker_is_freed_in_pieces() -> None:
    keys = [number.to_bytes(16, "big") for number in range(SWEPT_KEYS + 1)]
    index = index_of(*(BlockStored(key, ROOT, []) for key in keys), StateStored(keys[0]), hybrid=True)
    assert not index.sweep()
    index.forget("a")
    assert index.num_bytes == 0
    assert [index.sweep() for _ in range(4)] == [True, True, False, False]
