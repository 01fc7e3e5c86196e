"""An index from block keys to the workers that report to hold the blocks. No I/O.

A block key stands for the whole prompt up to the end of the block (saccade.identity.blocks), so a match compares keys
from the root on. The match ends before the first missing block, even if later blocks are held. A reported block whose
parent is not held is an orphan: no prompt can reach it, so it is counted and dropped.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from saccade.fleet.key_masks import KeyMasks
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents, StateRemoved, StateStored

BYTES_PER_KEY = 160
"""The memory of one key: 64 bytes, the size class of an object of 49, and up to 96 in a dict that has just grown."""


class Partition(NamedTuple):
    """Keys of different partitions mean different blocks: *fingerprint* names model and weights."""

    fingerprint: bytes
    block_size: int


class _Worker:
    """The reports of one worker, whose keys have *bit*.

    A prompt resumes only where the last *num_to_resume* blocks, or all if they are fewer, have a state. The worker's
    cache has *capacity* blocks. *found_at* is the number of the look-up that last found the longest prefix there.
    """

    def __init__(self, partition: Partition, bit: int, num_to_resume: int, capacity: int) -> None:
        self.partition = partition
        self.bit = bit
        self.num_to_resume = num_to_resume
        self.capacity = capacity
        self.num_blocks = 0
        self.num_states = 0
        self.is_whole = False
        self.found_at = 0

    @property
    def num_to_come(self) -> int:
        """Blocks that the worker may still store before it must drop others."""
        return max(0, self.capacity - self.num_blocks)


class BlockIndex:
    """The blocks of every worker, by the worker's name.

    All keys together should take at most *max_bytes*. A key of several workers counts once, and the keys of forgotten
    workers count until they are swept. A worker that would not fit with full caches does not begin. If workers hold
    more than they announced, or less in common, the index is over its limit until the caller has evicted one and swept
    its keys.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._workers: dict[str, _Worker] = {}
        self._num_lookups = 0
        self._blocks = KeyMasks()
        self._states = KeyMasks()

    @property
    def num_bytes(self) -> int:
        """Estimated memory of all keys."""
        return (len(self._blocks) + len(self._states)) * BYTES_PER_KEY

    @property
    def is_over(self) -> bool:
        """Whether the keys take more than *max_bytes*."""
        return self.num_bytes > self.max_bytes

    @property
    def _forgotten_bits(self) -> int:
        """The bits of forgotten workers whose keys are not swept yet."""
        return self._blocks.bits_in_use | self._states.bits_in_use

    def begin(
        self, worker: str, partition: Partition, *, resumes_at_states: bool, num_blocks: int = 0, window: int = 0
    ) -> bool:
        """Forget what *worker* holds; its next message begins a snapshot.

        With *resumes_at_states*, prompts resume only after a block with a state; with a *window* in tokens, only after
        as many as it has. Return False if there is no room for a worker with *num_blocks*: its blocks are then not
        known.
        """
        self.forget(worker)
        num_to_come = sum(entry.num_to_come for entry in self._workers.values()) + num_blocks
        if self.num_bytes + num_to_come * BYTES_PER_KEY > self.max_bytes:
            return False
        used = self._forgotten_bits
        for other in self._workers.values():
            used |= other.bit
        # The lowest bit that is not used.
        num_to_resume = max(int(resumes_at_states), -(-(window - 1) // partition.block_size))
        self._workers[worker] = _Worker(partition, ~used & (used + 1), num_to_resume, num_blocks)
        return True

    def evict(self) -> str:
        """Forget a worker, and return its name; "" if there is none.

        It is the worker where a look-up found the longest prefix least recently. Of several without any, it is the
        newest: so a worker that holds more than it announced drives out no worker that fits.
        """
        worker = min(reversed(self._workers), key=lambda name: self._workers[name].found_at, default="")
        self.forget(worker)
        return worker

    def forget(self, worker: str) -> None:
        """Remove *worker* and its blocks. sweep() frees the memory."""
        if (entry := self._workers.pop(worker, None)) is not None:
            self._blocks.give_up(entry.bit)
            self._states.give_up(entry.bit)

    def sweep(self) -> bool:
        """Free some of the memory of forgotten workers; return whether there is more to do."""
        return self._blocks.sweep() | self._states.sweep()

    def take(self, worker: str, message: KvEvents) -> int:
        """Apply the next message of *worker*, which must have begun; return its number of orphans."""
        entry = self._workers[worker]
        num_orphans = self._learn(entry, message.events)
        entry.is_whole = entry.is_whole or (message.snapshot and message.last)
        return num_orphans

    def _learn(self, entry: _Worker, events: Iterable[KvEvent]) -> int:
        """Apply *events* to one worker; return the number of orphans."""
        blocks, bit, num_orphans = self._blocks, entry.bit, 0
        for event in events:
            # isinstance, because this loop sees every event of every worker, and class patterns take far longer.
            if isinstance(event, BlockStored):
                if event.is_first or blocks.get(event.parent) & bit:
                    entry.num_blocks += blocks.add(event.key, bit)
                else:
                    num_orphans += 1
            elif isinstance(event, BlockRemoved):
                entry.num_blocks -= blocks.discard(event.key, bit)
            elif entry.num_to_resume and isinstance(event, StateStored):
                entry.num_states += self._states.add(event.key, bit)
            elif entry.num_to_resume and isinstance(event, StateRemoved):
                entry.num_states -= self._states.discard(event.key, bit)
        return num_orphans

    def is_exact(self, worker: str) -> bool:
        """Whether all that *worker* holds is known: the last piece of its snapshot has arrived."""
        return worker in self._workers and self._workers[worker].is_whole

    def num_blocks(self, worker: str) -> int:
        """Return how many blocks *worker* is known to hold."""
        return self._workers[worker].num_blocks if worker in self._workers else 0

    def num_states(self, worker: str) -> int:
        """Return at how many boundaries *worker* is known to hold states."""
        return self._workers[worker].num_states if worker in self._workers else 0

    def overlaps(self, partition: Partition, keys: Sequence[bytes]) -> Mapping[str, int]:
        """Return for each worker of *partition* after how many of *keys*, from the root on, a prompt could resume."""
        workers = {name: entry for name, entry in self._workers.items() if entry.partition == partition}
        lengths = _leading(self._blocks, sum(entry.bit for entry in workers.values()), keys)
        self._num_lookups += 1
        if longest := max(lengths.values(), default=0):
            for entry in workers.values():
                if lengths[entry.bit] == longest:
                    entry.found_at = self._num_lookups
        return {
            name: self._last_states(entry, keys, lengths[entry.bit]) if entry.num_to_resume else lengths[entry.bit]
            for name, entry in workers.items()
        }

    def _last_states(self, entry: _Worker, keys: Sequence[bytes], num_held: int) -> int:
        """Return the length of the longest prefix of the *num_held* first keys that ends at enough states."""
        stop = num_held
        for index in range(num_held - 1, -1, -1):
            if stop - index > entry.num_to_resume:
                break
            if not self._states.get(keys[index]) & entry.bit:
                stop = index
        return stop


def _leading(masks: KeyMasks, workers: int, keys: Sequence[bytes]) -> dict[int, int]:
    """Return by bit how many of *keys*, from the first on, each of *workers* holds."""
    lengths: dict[int, int] = {}
    for count, mask in enumerate(masks.of(keys)):
        if mask & workers != workers:
            absent = workers & ~mask
            lengths |= dict.fromkeys(_bits(absent), count)
            workers ^= absent
            if not workers:
                return lengths
    return lengths | dict.fromkeys(_bits(workers), len(keys))


def _bits(mask: int) -> Iterable[int]:
    """Yield the bits that are set in *mask*."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
