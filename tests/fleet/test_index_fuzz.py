"""The index against a naive model over thousands of random steps: a set of keys for each worker, and its parents."""

from dataclasses import dataclass, field
from random import Random

import pytest

from saccade.fleet import key_masks
from saccade.fleet.index import BlockIndex, Partition, image_key
from saccade.protocol.kv_events import (
    BlockOffloaded,
    BlockRemoved,
    BlockStored,
    ImageRemoved,
    ImageStored,
    KvEvent,
    KvEvents,
    OffloadedRemoved,
    StateRemoved,
    StateStored,
)

PARTITIONS = (Partition(b"f", 16), Partition(b"f", 32), Partition(b"g", 16))
NUM_WORKERS = 9
STEPS_BETWEEN = 5
"""Between two comparisons of all workers, which take longer than a step."""

CHAINS = [[f"{chain if depth > 3 else chain % 2}-{depth}".encode() for depth in range(10)] for chain in range(6)]
"""Prompts in keys; those of one parity begin alike."""

KEYS = sorted({key for chain in CHAINS for key in chain})
IMAGES = [(salt, content_hash) for salt in (b"", b"salt") for content_hash in (b"p", b"q", b"r")]


@dataclass
class Naive:
    """A worker as a set of keys. It resumes only after *num_to_resume* blocks with states, 0 for anywhere.

    Without a *partition*, it reports no blocks.
    """

    partition: Partition | None
    num_to_resume: int = 0
    keys: set[bytes] = field(default_factory=set)
    states: set[bytes] = field(default_factory=set)
    offloaded: set[bytes] = field(default_factory=set)
    images: set[tuple[bytes, bytes]] = field(default_factory=set)
    is_whole: bool = False

    def learn(self, events: list[KvEvent]) -> int:
        num_orphans = 0
        for event in events:
            match event:
                case ImageStored():
                    self.images.add((event.salt, event.content_hash))
                case ImageRemoved():
                    self.images.discard((event.salt, event.content_hash))
                case _ if self.partition is None:
                    pass
                case BlockStored() if event.is_first or event.parent in self.keys:
                    self.keys.add(event.key)
                case BlockStored():
                    num_orphans += 1
                case BlockRemoved():
                    self.keys.discard(event.key)
                case BlockOffloaded():
                    self.offloaded.add(event.key)
                case OffloadedRemoved():
                    self.offloaded.discard(event.key)
                case StateStored() if self.num_to_resume:
                    self.states.add(event.key)
                case StateRemoved():
                    self.states.discard(event.key)
        return num_orphans

    def overlap_with_offloaded(self, keys: list[bytes]) -> int:
        held = self.keys | self.offloaded
        return 0 if self.num_to_resume else next((at for at, key in enumerate(keys) if key not in held), len(keys))

    def overlap(self, keys: list[bytes]) -> int:
        num_held = next((number for number, key in enumerate(keys) if key not in self.keys), len(keys))
        for stop in range(num_held, 0, -1):
            needed = keys[max(0, stop - self.num_to_resume) : stop]
            if all(key in self.states for key in needed):
                return stop
        return 0


def random_events(random: Random) -> list[KvEvent]:
    events: list[KvEvent] = []
    for _ in range(random.randrange(1, 8)):
        chain = random.choice(CHAINS)
        depth = random.randrange(len(chain))
        match random.randrange(10):
            case 0 | 1 | 2:
                parent = chain[depth - 1] if depth else b"root"
                events.append(BlockStored(chain[depth], parent, [], is_first=not depth))
            case 3:
                events.append(BlockRemoved(random.choice(KEYS)))
            case 4:
                events.append(StateStored(chain[depth]))
            case 5:
                events.append(ImageStored(*random.choice(IMAGES)))
            case 7:
                events.append(BlockOffloaded(chain[depth]))
            case 8:
                events.append(OffloadedRemoved(random.choice(KEYS)))
            case 6:
                events.append(ImageRemoved(*random.choice(IMAGES)))
            case _:
                events.append(StateRemoved(random.choice(KEYS)))
    return events


def walk(seed: int, num_steps: int) -> None:
    """Take *num_steps* random steps, and compare what the index says with the naive workers."""
    random, index, naive = Random(seed), BlockIndex(1 << 30), dict[str, Naive]()
    names = [f"worker {number}" for number in range(NUM_WORKERS)]
    for step in range(num_steps):
        name = random.choice(names)
        match random.randrange(12):
            case 0:
                partition, num_to_resume = random.choice(PARTITIONS), random.choice((0, 0, 1, 2))
                window = num_to_resume * partition.block_size if num_to_resume > 1 else 0
                index.begin(name, partition, resumes_at_states=num_to_resume == 1, window=window)
                naive[name] = Naive(partition, num_to_resume)
            case 1 if not random.randrange(2):
                index.begin_images(name)
                naive[name] = Naive(None)
            case 1 if not random.randrange(2):
                index.forget(name)
                naive.pop(name, None)
            case 2 | 3:
                index.sweep()
            case _ if name in naive:
                events, last = random_events(random), random.random() < 0.5
                snapshot = not naive[name].is_whole
                num_orphans = index.take(name, KvEvents(0, events, snapshot=snapshot, last=last))
                assert num_orphans == naive[name].learn(events), seed
                naive[name].is_whole |= snapshot and last and naive[name].partition is not None
        if not step % STEPS_BETWEEN:
            compare(index, naive, names, random, seed)
    while index.sweep():
        pass
    compare(index, naive, names, random, seed)


def compare(index: BlockIndex, naive: dict[str, Naive], names: list[str], random: Random, seed: int) -> None:
    chain = random.choice(CHAINS)
    keys = chain[: random.randrange(len(chain) + 1)]
    for partition in PARTITIONS:
        lengths, in_all = index.overlaps(partition, keys), index.overlaps_with_offloaded(partition, keys)
        places = index.places_of(names)
        for name, place in zip(names, places, strict=True):
            worker = naive.get(name)
            expected = worker.overlap(keys) if worker is not None and worker.partition == partition else 0
            assert lengths[place] == expected, (seed, name, keys)
            has_these = worker is not None and worker.partition == partition
            assert in_all[place] == (worker.overlap_with_offloaded(keys) if has_these else 0), (seed, name, keys)
    have_images = index.have_images([image_key(*image) for image in IMAGES])[:, index.places_of(names)]
    for number, image in enumerate(IMAGES):
        expected_holders = [name in naive and image in naive[name].images for name in names]
        assert have_images[number].tolist() == expected_holders, (seed, image)
    for name in names:
        worker = naive.get(name)
        assert index.is_exact(name) == (worker is not None and worker.is_whole), (seed, name)
        assert index.num_blocks(name) == (0 if worker is None else len(worker.keys)), (seed, name)
        assert index.num_states(name) == (0 if worker is None else len(worker.states)), (seed, name)


@pytest.fixture(autouse=True)
def sweeps_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_masks, "SWEPT_KEYS", 7)


@pytest.mark.parametrize("seed", range(3))
def test_index_equals_the_naive_workers(seed: int) -> None:  # E5, E8
    walk(seed, 600)


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(100, 130))
def test_index_equals_the_naive_workers_for_long(seed: int) -> None:  # E5, E8
    walk(seed, 3000)
