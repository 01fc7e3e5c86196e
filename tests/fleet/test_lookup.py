"""Looking up what workers hold."""

from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.lookup import LocalLookup, LookupTarget, Overlap
from saccade.protocol.kv_events import BlockStored, KvEvents

HERE, SMALL, OTHER = Partition(b"f", 16), Partition(b"f", 8), Partition(b"g", 16)


async def test_each_worker_is_looked_up_by_its_own_keys() -> None:  # E8
    index = BlockIndex(1 << 20)
    for worker, partition, keys in (("a", HERE, b"12"), ("b", SMALL, b"3"), ("c", OTHER, b"5")):
        index.begin(worker, partition, resumes_at_states=False)
        events = [BlockStored(bytes([key]), b"", []) for key in keys]
        index.take(worker, KvEvents(1, list(events), snapshot=True, last=worker != "c"))
    targets = [LookupTarget("a", HERE), LookupTarget("b", SMALL), LookupTarget("c", OTHER), LookupTarget("away", HERE)]
    keys = {HERE: [b"1", b"2", b"3"], SMALL: [b"3", b"1"], OTHER: [b"5"]}
    assert await LocalLookup(index).overlaps(targets, keys) == {
        "a": Overlap(2, is_exact=True),
        "b": Overlap(1, is_exact=True),
        "c": Overlap(1, is_exact=False),
        "away": Overlap(0, is_exact=False),
    }
