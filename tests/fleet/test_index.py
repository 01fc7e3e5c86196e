"""The index of what workers hold."""

from collections import deque
from collections.abc import Sequence
from itertools import count, takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.fleet.index import BYTES_PER_KEY, BlockIndex, Partition
from saccade.fleet.key_masks import SWEPT_KEYS
from saccade.identity.blocks import block_keys, root_key
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents, StateRemoved, StateStored

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


def overlap(index: BlockIndex, keys: Sequence[bytes], worker: str = "a") -> int:
    return int(index.overlaps(HERE, keys)[index.places_of([worker])[0]])


def overlaps(index: BlockIndex, partition: Partition, keys: Sequence[bytes]) -> dict[str, int]:
    """The workers that hold some of *keys*, and how many."""
    lengths = index.overlaps(partition, keys)
    places = dict(zip("abcd", index.places_of("abcd").tolist(), strict=True))
    return {worker: int(lengths[place]) for worker, place in places.items() if lengths[place]}


def test_overlap_is_the_longest_held_prefix() -> None:
    index = index_of(*stored(0, 1, 2, 5))
    assert overlaps(index, HERE, KEYS) == {"a": 3}
    assert overlap(index, KEYS[:2]) == 2
    assert overlap(index, block_keys(root_key(b"f", b"other"), range(40), (), 4)) == 0  # another tenant
    assert overlap(index, []) == 0


def test_an_orphan_is_dropped_and_counted() -> None:  # E5
    index = BlockIndex(1 << 20)
    index.begin("a", HERE, resumes_at_states=False)
    assert index.take("a", KvEvents(3, stored(1, 2, 0, 1), snapshot=True)) == 2
    assert index.num_blocks("a") == 2
    assert overlap(index, KEYS) == 2
    assert overlap(index, KEYS[2:]) == 0
    assert index.take("a", KvEvents(4, stored(2))) == 0
    assert overlap(index, KEYS) == 3


def test_children_match_again_when_their_parent_returns() -> None:
    index = index_of(*stored(0, 1, 2))
    index.take("a", KvEvents(4, [BlockRemoved(KEYS[0])]))
    assert overlap(index, KEYS) == 0
    index.take("a", KvEvents(5, stored(0)))
    assert overlap(index, KEYS) == 3


@pytest.mark.parametrize("other", [Partition(b"g", 4), Partition(b"f", 16)])
def test_partitions_share_nothing(other: Partition) -> None:
    index = index_of(*stored(0, 1))
    index.begin("b", other, resumes_at_states=False)
    assert overlaps(index, other, KEYS) == {}
    index.take("b", KvEvents(1, stored(0), snapshot=True))
    assert overlaps(index, other, KEYS) == {"b": 1}
    assert overlaps(index, HERE, KEYS) == {"a": 2}


def test_increments_change_what_is_held() -> None:
    index = index_of(*stored(0, 1, 2, 3))
    index.take("a", KvEvents(4, [BlockRemoved(KEYS[2]), *stored(4)]))
    assert overlap(index, KEYS) == 2
    assert index.num_blocks("a") == 4
    index.take("a", KvEvents(5, [*stored(2, 2), BlockRemoved(b"unknown")]))
    assert overlap(index, KEYS) == 5
    assert index.num_bytes == 5 * BYTES_PER_KEY


def test_a_worker_is_exact_after_the_last_piece_of_its_snapshot() -> None:
    index = BlockIndex(1 << 20)
    index.begin("a", HERE, resumes_at_states=False)
    assert not index.is_exact("a")
    index.take("a", KvEvents(7, stored(0), snapshot=True, last=False))
    assert not index.is_exact("a")
    index.take("a", KvEvents(7, stored(1), snapshot=True))
    assert index.is_exact("a")
    assert overlap(index, KEYS) == 2


def test_restart_clears_the_worker() -> None:
    index = index_of(*stored(0, 1))
    index.begin("a", HERE, resumes_at_states=False)
    assert not index.is_exact("a")
    assert overlap(index, KEYS) == index.num_blocks("a") == 0
    index.take("a", KvEvents(0, stored(0), snapshot=True))
    assert overlap(index, KEYS) == 1
    index.forget("a")
    index.forget("a")
    assert index.num_blocks("a") == index.num_states("a") == 0


def test_a_hybrid_resumes_only_at_states() -> None:
    index = index_of(*stored(0, 1, 2, 3), StateStored(KEYS[1]), StateStored(KEYS[5]), hybrid=True)
    assert overlap(index, KEYS) == 2
    assert index.num_states("a") == 2
    index.take("a", KvEvents(4, stored(4, 5)))
    assert overlap(index, KEYS) == 6
    assert overlap(index, KEYS[:5]) == 2
    index.take("a", KvEvents(5, [StateRemoved(KEYS[1])]))
    assert overlap(index, KEYS[:5]) == 0


def test_prompt_of_a_model_with_windows_resumes_where_the_last_window_is_held() -> None:
    """A token sees seven tokens back, in two blocks; a block may be held without the one before it."""
    states = [StateStored(KEYS[number]) for number in (0, 1, 3, 4)]
    index = BlockIndex(1 << 20)
    index.begin("a", HERE, resumes_at_states=False, window=8)
    index.take("a", KvEvents(3, [*stored(0, 1, 2, 3, 4, 5), *states], snapshot=True))
    assert overlap(index, KEYS) == overlap(index, KEYS[:5]) == 5
    assert overlap(index, KEYS[:4]) == 2
    assert overlap(index, KEYS[:1]) == 1  # all blocks of a beginning that is shorter than the window
    index.take("a", KvEvents(4, [StateRemoved(KEYS[4]), StateRemoved(KEYS[0])]))
    assert overlap(index, KEYS) == 0
    index.begin("b", HERE, resumes_at_states=False, window=1)
    index.take("b", KvEvents(3, stored(0, 1, 2), snapshot=True))
    assert overlap(index, KEYS, "b") == 3


def test_shared_keys_count_once_and_a_full_index_evicts_the_worker_that_look_ups_find_least() -> None:
    index = index_of(*stored(0, 1), max_bytes=3 * BYTES_PER_KEY)
    assert index.begin("b", HERE, resumes_at_states=False, num_blocks=1)
    assert index.take("b", KvEvents(1, stored(0, 1, 2), snapshot=True)) == 0
    assert (index.num_bytes, index.is_over) == (3 * BYTES_PER_KEY, False)
    assert overlaps(index, HERE, KEYS) == {"a": 2, "b": 3}  # the longest prefix is at b
    index.take("a", KvEvents(4, [BlockRemoved(KEYS[1]), BlockStored(b"other", ROOT, [])]))
    assert index.is_over
    assert index.evict() == "a"
    assert (index.is_exact("a"), index.is_exact("b")) == (False, True)
    swept(index)
    assert index.num_bytes == 3 * BYTES_PER_KEY


def test_newest_worker_without_lookups_is_evicted() -> None:
    index = index_of(*stored(0))
    assert index.begin("b", HERE, resumes_at_states=False)
    assert [index.evict() for _ in range(3)] == ["b", "a", ""]


def test_a_worker_that_would_not_fit_does_not_begin() -> None:
    index = index_of(*stored(0, 1), max_bytes=10 * BYTES_PER_KEY)
    assert not index.begin("b", HERE, resumes_at_states=False, num_blocks=9)
    assert not index.is_exact("b")
    assert index.begin("b", HERE, resumes_at_states=False, num_blocks=8)
    assert not index.begin("c", HERE, resumes_at_states=False, num_blocks=1)  # b has its room before it needs it
    index.take("b", KvEvents(1, [*stored(0, 1), *(BlockStored(bytes([n]), ROOT, []) for n in range(6))], snapshot=True))
    assert index.begin("c", HERE, resumes_at_states=False, num_blocks=2)  # a and b have two blocks in common
    assert not index.begin("c", HERE, resumes_at_states=False, num_blocks=3)


def test_a_fleet_that_does_not_fit_stays_within_the_limit_and_does_not_change_places() -> None:
    """120 workers with room for 33, whose caches fill up and turn over. A worker that is not known asks every turn."""
    room, num_blocks, num_workers, num_fresh = 33, 100, 120, 20
    index = BlockIndex(room * num_blocks * BYTES_PER_KEY)
    numbers = count()
    held: dict[str, deque[bytes]] = {str(worker): deque(maxlen=num_blocks) for worker in range(num_workers)}
    known: list[frozenset[str]] = []
    for _ in range(40):
        for worker, keys in held.items():
            fresh = [next(numbers).to_bytes(16, "big") for _ in range(num_fresh)]
            gone = [keys.popleft() for _ in range(len(keys) + num_fresh - num_blocks)]
            keys.extend(fresh)
            events: list[KvEvent] = [BlockStored(key, ROOT, [], is_first=True) for key in fresh]
            events += [BlockRemoved(key) for key in gone]
            if index.is_exact(worker):
                index.take(worker, KvEvents(1, events))
            else:
                swept(index)
                if index.begin(worker, HERE, resumes_at_states=False, num_blocks=num_blocks):
                    snapshot: list[KvEvent] = [BlockStored(key, ROOT, [], is_first=True) for key in keys]
                    index.take(worker, KvEvents(1, snapshot, snapshot=True))
            while index.is_over:
                index.evict()
                swept(index)
        known.append(frozenset(worker for worker in held if index.is_exact(worker)))
    assert {len(workers) for workers in known} == {room}
    assert len(set(known)) == 1


def swept(index: BlockIndex) -> None:
    while index.sweep():
        pass


def test_the_memory_of_a_forgotten_worker_is_freed_in_pieces_while_others_change() -> None:
    num_keys = 3 * SWEPT_KEYS
    keys = [number.to_bytes(16, "big") for number in range(num_keys)]
    all_of_them: list[KvEvent] = [BlockStored(key, ROOT, []) for key in keys]
    index = index_of(*all_of_them, *stored(0, 1), StateStored(KEYS[0]), hybrid=True)
    index.begin("b", HERE, resumes_at_states=False)
    index.take("b", KvEvents(1, [*all_of_them[::2], *stored(0, 1, 2)], snapshot=True))
    index.forget("a")
    assert index.sweep()
    index.begin("a", HERE, resumes_at_states=False)
    assert overlaps(index, HERE, KEYS) == {"b": 3}
    index.take("a", KvEvents(1, stored(0), snapshot=True))
    index.take("b", KvEvents(2, [BlockRemoved(KEYS[2]), BlockRemoved(keys[0]), BlockRemoved(keys[-2])]))
    assert overlaps(index, HERE, KEYS) == {"b": 2, "a": 1}
    assert overlaps(index, HERE, keys[2:3]) == {"b": 1}
    swept(index)
    assert overlaps(index, HERE, KEYS) == {"b": 2, "a": 1}
    assert index.num_blocks("b") == num_keys // 2
    assert index.num_bytes == (num_keys // 2 - 2 + 2) * BYTES_PER_KEY
    assert not index.sweep()


@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from(["store", "remove", "restart", "sweep"]), st.integers(0, 9)),
        max_size=80,
    )
)
def test_index_equals_a_set_for_each_worker(steps: list[tuple[str, str, int]]) -> None:
    """Whatever is stored, removed, restarted and swept in between."""
    index = BlockIndex(1 << 20)
    held: dict[str, set[int]] = {}
    for worker, step, number in steps:
        if step == "sweep":
            index.sweep()
        elif step == "restart" or worker not in held:
            index.begin(worker, HERE, resumes_at_states=False)
            held[worker] = set()
        elif step == "store":
            is_orphan = bool(number) and number - 1 not in held[worker]
            assert index.take(worker, KvEvents(1, stored(number))) == is_orphan
            held[worker] |= set() if is_orphan else {number}
        else:
            index.take(worker, KvEvents(1, [BlockRemoved(KEYS[number])]))
            held[worker].discard(number)
        expected = {name: len(list(takewhile(numbers.__contains__, range(10)))) for name, numbers in held.items()}
        assert overlaps(index, HERE, KEYS) == {name: count for name, count in expected.items() if count}
        assert {name: index.num_blocks(name) for name in held} == {name: len(keys) for name, keys in held.items()}
    swept(index)
    assert index.num_bytes == len(set().union(*held.values())) * BYTES_PER_KEY
