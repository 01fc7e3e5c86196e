"""An index from the keys of blocks and images to the workers that report them. It does no I/O.

A block key stands for the whole prompt up to the end of the block (saccade.identity.blocks), so a match compares keys
from the root on. The match ends before the first missing block, even if later blocks are held. A reported block whose
parent is not held is an orphan: no prompt can reach it, so it is counted and dropped.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from saccade.fleet.bits import flags_of, numbers_of
from saccade.fleet.key_masks import KeyMasks
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

BYTES_PER_KEY = 160
"""The memory of one key: 64 bytes, the size class of an object of 49, and up to 96 in a dict that has just grown."""

MAX_IMAGES = 1 << 18
"""Images of one worker, about 60 MiB; more than any encoder cache has room for. The pixels of others are sent again."""


class Partition(NamedTuple):
    """Keys of different partitions mean different blocks. *fingerprint* names the model and its weights."""

    fingerprint: bytes
    block_size: int


class _Worker:
    """The reports of one worker, whose keys have *bit*: bit number *place*.

    A prompt resumes only where the last *num_to_resume* blocks, or all if they are fewer, have a state. The worker's
    cache has *capacity* blocks. Without a *partition*, it reports no blocks.
    """

    def __init__(self, partition: Partition | None, bit: int, num_to_resume: int = 0, capacity: int = 0) -> None:
        self.partition = partition
        self.bit = bit
        self.place = bit.bit_length() - 1
        self.num_to_resume = num_to_resume
        self.capacity = capacity
        self.num_blocks = 0
        self.num_states = 0
        self.num_images = 0
        self.is_whole = False

    @property
    def num_to_come(self) -> int:
        """Blocks that the worker may still store before it must drop others."""
        return max(0, self.capacity - self.num_blocks)


class BlockIndex:
    """The blocks and images of every worker, by the worker's name.

    All keys of blocks together should take at most *max_bytes*; images are few, and do not count. Blocks in the memory
    of CPUs get a quarter more; if there are more of them, the others are not known. A key of several workers counts
    once, and the keys of forgotten workers count until they are swept. A worker that would not fit with full caches
    does not begin. If workers hold more than they announced, or less in common, the index is over its limit until the
    caller has evicted one and swept its keys.

    The results of a look-up are arrays with an element for each place. Places stay the same while *num_changes* does.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_changes = 0
        self._workers: dict[str, _Worker] = {}
        self._num_lookups = 0
        # By place; no worker has the last one. For each, the number of the look-up that last found the longest prefix.
        self._found_at = np.zeros(1, np.int64)
        self.are_whole = np.zeros(1, np.bool_)
        """Whether all that the worker at each place holds is known."""
        self._bits: dict[Partition, int] = {}
        self._resuming: dict[Partition, list[_Worker]] = {}
        self._blocks = KeyMasks()
        self._states = KeyMasks()
        self._images = KeyMasks()
        self._offloaded = KeyMasks()

    @property
    def num_bytes(self) -> int:
        """Estimated memory of all keys, without those of images."""
        return self._num_bounded_bytes + len(self._offloaded) * BYTES_PER_KEY

    @property
    def _num_bounded_bytes(self) -> int:
        return (len(self._blocks) + len(self._states)) * BYTES_PER_KEY

    @property
    def is_over(self) -> bool:
        """Whether the keys, but for blocks in the memory of CPUs, take more than *max_bytes*."""
        return self._num_bounded_bytes > self.max_bytes

    @property
    def _forgotten_bits(self) -> int:
        """The bits of forgotten workers whose keys are not swept yet."""
        sets = (self._blocks, self._states, self._images, self._offloaded)
        return reduce(or_, (keys.bits_in_use for keys in sets))

    def begin(
        self, worker: str, partition: Partition, *, resumes_at_states: bool, num_blocks: int = 0, window: int = 0
    ) -> bool:
        """Forget what *worker* holds; its next message begins a snapshot.

        With *resumes_at_states*, prompts resume only after a block with a state; with a *window* in tokens, only after
        as many such blocks as it spans. Return False if there is no room for a worker with *num_blocks*: its blocks are
        then not known.
        """
        self.forget(worker)
        num_to_come = sum(entry.num_to_come for entry in self._workers.values()) + num_blocks
        if self._num_bounded_bytes + num_to_come * BYTES_PER_KEY > self.max_bytes:
            return False
        num_to_resume = max(int(resumes_at_states), -(-(window - 1) // partition.block_size))
        entry = _Worker(partition, self._free_bit(), num_to_resume, num_blocks)
        self._enter(worker, entry)
        self._bits[partition] = self._bits.get(partition, 0) | entry.bit
        if num_to_resume:
            self._resuming.setdefault(partition, []).append(entry)
        return True

    def begin_images(self, worker: str) -> None:
        """Forget what *worker* holds; its next message begins a snapshot of its images, without blocks."""
        self.forget(worker)
        self._enter(worker, _Worker(None, self._free_bit()))

    def _free_bit(self) -> int:
        """Return the lowest bit that is not used."""
        used = self._forgotten_bits
        for other in self._workers.values():
            used |= other.bit
        return ~used & (used + 1)

    def _enter(self, worker: str, entry: _Worker) -> None:
        self._workers[worker] = entry
        self.num_changes += 1
        missing = entry.place + 2 - len(self._found_at)
        if missing > 0:
            self._found_at = np.pad(self._found_at, (0, missing))
            self.are_whole = np.pad(self.are_whole, (0, missing))
        self._found_at[entry.place] = 0

    def evict(self) -> str:
        """Forget a worker that reports blocks, and return its name, or "" if there is none.

        It is the worker at which a look-up found the longest prefix least recently. Of several without any, it is the
        newest, so that a worker that holds more than it announced drives out no worker that fits.
        """
        found_at = self._found_at
        with_blocks = [name for name, entry in reversed(self._workers.items()) if entry.partition is not None]
        worker = min(with_blocks, key=lambda name: int(found_at[self._workers[name].place]), default="")
        self.forget(worker)
        return worker

    def forget(self, worker: str) -> None:
        """Remove *worker*, its blocks and its images. sweep() frees the memory."""
        if (entry := self._workers.pop(worker, None)) is not None:
            self.num_changes += 1
            self.are_whole[entry.place] = False
            self._images.give_up(entry.bit)
            if entry.partition is None:
                return
            self._bits[entry.partition] ^= entry.bit
            if not self._bits[entry.partition]:
                del self._bits[entry.partition]
            if entry.num_to_resume:
                self._resuming[entry.partition].remove(entry)
            self._blocks.give_up(entry.bit)
            self._states.give_up(entry.bit)
            self._offloaded.give_up(entry.bit)

    def sweep(self) -> bool:
        """Free some of the memory of forgotten workers; return whether there is more to do."""
        return self._blocks.sweep() | self._states.sweep() | self._images.sweep() | self._offloaded.sweep()

    def take(self, worker: str, message: KvEvents) -> int:
        """Apply the next message of *worker*, which must have begun; return its number of orphans."""
        entry = self._workers[worker]
        if entry.partition is None:
            self._learn_images(entry, message.events)
            return 0
        num_orphans = self._learn(entry, message.events)
        if message.snapshot and message.last:
            entry.is_whole = True
            self.are_whole[entry.place] = True
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
            elif isinstance(event, BlockOffloaded):
                if len(self._offloaded) * BYTES_PER_KEY < self.max_bytes // 4:
                    self._offloaded.add(event.key, bit)
            elif isinstance(event, OffloadedRemoved):
                self._offloaded.discard(event.key, bit)
            else:
                self._learn_images(entry, (event,))
        return num_orphans

    def _learn_images(self, entry: _Worker, events: Iterable[KvEvent]) -> None:
        """Apply the *events* about images to one worker."""
        for event in events:
            if isinstance(event, ImageRemoved):
                entry.num_images -= self._images.discard(image_key(event.salt, event.content_hash), entry.bit)
            elif isinstance(event, ImageStored) and entry.num_images < MAX_IMAGES:
                entry.num_images += self._images.add(image_key(event.salt, event.content_hash), entry.bit)

    def is_exact(self, worker: str) -> bool:
        """Return whether all that *worker* holds is known: the last piece of its snapshot has arrived."""
        return worker in self._workers and self._workers[worker].is_whole

    def num_blocks(self, worker: str) -> int:
        """Return how many blocks *worker* is known to hold."""
        return self._workers[worker].num_blocks if worker in self._workers else 0

    def num_states(self, worker: str) -> int:
        """Return at how many boundaries *worker* is known to hold states."""
        return self._workers[worker].num_states if worker in self._workers else 0

    def places_of(self, workers: Iterable[str]) -> NDArray[np.intp]:
        """Return the place of each of *workers*, or -1 for one that has not begun."""
        return np.array([entry.place if (entry := self._workers.get(name)) else -1 for name in workers], np.intp)

    def overlaps(self, partition: Partition, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Return, for each place, after how many of *keys* from the root on a prompt could resume."""
        lengths = np.zeros(len(self._found_at), np.int64)
        _find_leading(self._blocks.of(keys), self._bits.get(partition, 0), len(keys), lengths)
        self._num_lookups += 1
        if longest := lengths.max():
            self._found_at[lengths == longest] = self._num_lookups
        for entry in self._resuming.get(partition, ()):
            lengths[entry.place] = self._last_states(entry, keys, int(lengths[entry.place]))
        return lengths

    @property
    def has_offloaded(self) -> bool:
        """Whether a worker reports blocks in its CPU's memory."""
        return len(self._offloaded) > 0

    def overlaps_with_offloaded(self, partition: Partition, keys: Sequence[bytes]) -> NDArray[np.int64]:
        """Return the result of overlaps() if workers held the blocks that they can load from the memory of CPUs.

        It is 0 for workers that resume at states.
        """
        lengths = np.zeros(len(self._found_at), np.int64)
        masks = map(or_, self._blocks.of(keys), self._offloaded.of(keys))
        _find_leading(masks, self._bits.get(partition, 0), len(keys), lengths)
        lengths[[entry.place for entry in self._resuming.get(partition, ())]] = 0
        return lengths

    def have_images(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return, for each of *keys* and each place, whether the worker holds the image with this image_key()."""
        count = len(self._found_at)
        if not (keys and len(self._images)):
            return np.zeros((len(keys), count), np.bool_)
        flags = [flags_of(self._images.get(key), count) for key in keys]
        return np.array(flags, np.bool_)

    def _last_states(self, entry: _Worker, keys: Sequence[bytes], num_held: int) -> int:
        """Return the length of the longest prefix of the *num_held* first keys that ends at enough states."""
        stop = num_held
        for index in range(num_held - 1, -1, -1):
            if stop - index > entry.num_to_resume:
                break
            if not self._states.get(keys[index]) & entry.bit:
                stop = index
        return stop


def image_key(salt: bytes, content_hash: bytes) -> bytes:
    """Return what names an image of the tenant with *salt* in the index."""
    return salt + content_hash


def _find_leading(masks: Iterable[int], workers: int, num_keys: int, lengths: NDArray[np.int64]) -> None:
    """Write into *lengths*, by place, how many of *num_keys* keys each of *workers* holds, from the first on.

    *masks* are the holders of each key, as bits.
    """
    if not workers:
        return
    for count, mask in enumerate(masks):
        if mask & workers != workers:
            lengths[numbers_of(workers & ~mask)] = count
            workers &= mask
            if not workers:
                return
    lengths[numbers_of(workers)] = num_keys
