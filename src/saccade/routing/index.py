"""Which KV blocks the workers hold, by what they report: an index from block keys to workers. No I/O.

A block key stands for the whole prompt up to the end of the block (saccade.identity.blocks), so a match compares keys
from the root on. The match ends before a block that is not held, whatever is held after it. A reported block whose
parent is not held is an orphan: no prompt can reach it, so it is counted and dropped.
"""

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents, StateRemoved, StateStored

BYTES_PER_KEY = 136
"""Memory of one key of one worker: 49 bytes of object, in a size class of 64, and up to 72 of the set."""

SWEPT_KEYS = 4096
"""Keys of forgotten workers that are freed in one go, which takes less than a millisecond."""


class Partition(NamedTuple):
    """Keys of different partitions mean different blocks: *fingerprint* names model and weights."""

    fingerprint: bytes
    block_size: int


class _Holdings:
    """What one worker holds. *states* is None unless prompts can resume only at the keys in it."""

    def __init__(self, partition: Partition, resumes_at_states: bool) -> None:
        self.partition = partition
        self.blocks: set[bytes] = set()
        self.states: set[bytes] | None = set() if resumes_at_states else None
        self.is_whole = False

    @property
    def num_keys(self) -> int:
        return len(self.blocks) + len(self.states or ())

    def learn(self, events: Iterable[KvEvent]) -> int:
        """Change what is held by *events*; return how many orphans were among them."""
        blocks, states, num_orphans = self.blocks, self.states, 0
        for event in events:
            # isinstance, because this loop sees every event of every worker, and class patterns take far longer.
            if isinstance(event, BlockStored):
                if event.is_first or event.parent in blocks:
                    blocks.add(event.key)
                else:
                    num_orphans += 1
            elif isinstance(event, BlockRemoved):
                blocks.discard(event.key)
            elif states is not None and isinstance(event, StateStored):
                states.add(event.key)
            elif states is not None and isinstance(event, StateRemoved):
                states.discard(event.key)
        return num_orphans

    def overlap(self, keys: Sequence[bytes]) -> int:
        """Return how many of *keys*, from the root on, a prompt could resume after."""
        num_held = num_leading(keys, self.blocks)
        return num_held if self.states is None else last_of(keys[:num_held], self.states)


class BlockIndex:
    """The blocks of every worker, by the worker's name. The keys of all workers take at most about *max_bytes*."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._workers: dict[str, _Holdings] = {}
        self._forgotten: list[set[bytes]] = []
        self._num_keys = 0

    @property
    def num_bytes(self) -> int:
        """Estimated memory of all keys."""
        return self._num_keys * BYTES_PER_KEY

    def begin(self, worker: str, partition: Partition, *, resumes_at_states: bool) -> None:
        """Forget what *worker* holds; its next message begins a snapshot."""
        self.forget(worker)
        self._workers[worker] = _Holdings(partition, resumes_at_states)

    def forget(self, worker: str) -> None:
        """Remove *worker*: what it holds is not known any more. sweep() frees the memory."""
        if (holdings := self._workers.pop(worker, None)) is not None:
            self._num_keys -= holdings.num_keys
            self._forgotten += [keys for keys in (holdings.blocks, holdings.states) if keys]

    def sweep(self) -> bool:
        """Free some keys of forgotten workers; return whether there are more.

        To free a million keys at once would hold up the event loop for a tenth of a second.
        """
        if self._forgotten:
            keys = self._forgotten[-1]
            for _ in range(min(SWEPT_KEYS, len(keys))):
                keys.pop()
            if not keys:
                self._forgotten.pop()
        return bool(self._forgotten)

    def take(self, worker: str, message: KvEvents) -> int | None:
        """Learn from the next message of *worker*, which must have begun.

        Return how many orphans it had, None where the index is full: then the worker is forgotten.
        """
        holdings = self._workers[worker]
        before = holdings.num_keys
        num_orphans = holdings.learn(message.events)
        holdings.is_whole = holdings.is_whole or (message.snapshot and message.last)
        self._num_keys += holdings.num_keys - before
        if self.num_bytes > self.max_bytes:
            self.forget(worker)
            return None
        return num_orphans

    def is_exact(self, worker: str) -> bool:
        """Whether all that *worker* holds is known: the last piece of its snapshot has arrived."""
        return worker in self._workers and self._workers[worker].is_whole

    def num_blocks(self, worker: str) -> int:
        """Return how many blocks *worker* is known to hold."""
        return len(self._workers[worker].blocks) if worker in self._workers else 0

    def num_states(self, worker: str) -> int:
        """Return at how many boundaries *worker* is known to hold recurrent states."""
        return len(self._workers[worker].states or ()) if worker in self._workers else 0

    def overlap(self, worker: str, partition: Partition, keys: Sequence[bytes]) -> int:
        """Return how many of *keys*, from the root on, a prompt could resume after at *worker*.

        Returns 0 for a worker that is not known, or of another partition.
        """
        holdings = self._workers.get(worker)
        if holdings is None or holdings.partition != partition:
            return 0
        return holdings.overlap(keys)


def num_leading(keys: Sequence[bytes], held: Container[bytes]) -> int:
    """Return how many of *keys*, from the first on, are in *held*."""
    return len(list(takewhile(held.__contains__, keys)))


def last_of(keys: Sequence[bytes], held: Container[bytes]) -> int:
    """Return the length of the longest prefix of *keys* whose last key is in *held*."""
    return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in held), 0)
