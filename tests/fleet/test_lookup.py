"""Looking up what workers hold."""

from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import LocalLookup, Targets
from saccade.protocol.kv_events import BlockStored, KvEvents

HERE, SMALL, OTHER = Partition(b"f", 16), Partition(b"f", 8), Partition(b"g", 16)
TARGETS = Targets(("a", "b", "c", "away"), (HERE, SMALL, OTHER, HERE))
KEYS = {HERE: [b"1", b"2", b"3"], SMALL: [b"3", b"1"], OTHER: [b"5"]}


def report(index: BlockIndex, worker: str, partition: Partition, keys: bytes) -> None:
    index.begin(worker, partition, resumes_at_states=False)
    events = [BlockStored(bytes([key]), b"", []) for key in keys]
    index.take(worker, KvEvents(1, list(events), snapshot=True, last=worker != "c"))


async def test_each_worker_is_looked_up_by_its_own_keys() -> None:  # E8
    index = BlockIndex(1 << 20)
    for worker, partition, keys in (("a", HERE, b"12"), ("b", SMALL, b"3"), ("c", OTHER, b"5")):
        report(index, worker, partition, keys)
    found = await LocalLookup(index).overlaps(TARGETS, KEYS, ())
    assert found.num_blocks.tolist() == [2, 1, 1, 0]
    assert found.are_exact.tolist() == [True, True, False, False]


async def test_workers_that_come_and_go_are_found_by_the_same_targets() -> None:
    index = BlockIndex(1 << 20)
    lookup = LocalLookup(index)
    assert lookup.find(TARGETS, KEYS).num_blocks.tolist() == [0, 0, 0, 0]
    report(index, "away", HERE, b"123")
    report(index, "a", HERE, b"1")
    assert lookup.find(TARGETS, KEYS).num_blocks.tolist() == [1, 0, 0, 3]
    index.forget("away")
    assert lookup.find(TARGETS, KEYS).num_blocks.tolist() == [1, 0, 0, 0]
