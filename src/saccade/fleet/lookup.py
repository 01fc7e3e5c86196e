"""Looks up how much of a prompt each worker is known to hold, before one is chosen.

An index may be in another process, so a look-up may wait. Choosing and booking (saccade.fleet.router) must not: they
get the result as a value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from saccade.fleet.index import BlockIndex, Partition


class Overlaps(NamedTuple):
    """For each worker, how many leading blocks of a prompt it reported, and whether all it holds is known.

    It can load *num_offloaded* blocks after them from the CPU's memory. *have_images* has a row for each image of the
    prompt: whether each worker holds it.
    """

    num_blocks: NDArray[np.int64]
    are_exact: NDArray[np.bool_]
    have_images: NDArray[np.bool_]
    num_offloaded: NDArray[np.int64]

    @classmethod
    def unknown(cls, num_workers: int, num_images: int = 0) -> "Overlaps":
        """Return the overlaps of workers that report nothing."""
        flags = np.zeros((1 + num_images, num_workers), np.bool_)
        return cls(np.zeros(num_workers, np.int64), flags[0], flags[1:], np.zeros(num_workers, np.int64))

    def at(self, places: NDArray[np.intp]) -> "Overlaps":
        """Return only the overlaps of the workers at *places*."""
        return Overlaps(
            self.num_blocks[places], self.are_exact[places], self.have_images[:, places], self.num_offloaded[places]
        )


@dataclass(frozen=True, eq=False)
class Targets:
    """Workers to look up, by name, and the partition of each one's keys. The same object is looked up many times."""

    names: Sequence[str]
    partitions: Sequence[Partition]


class Lookup(Protocol):
    """Finds how much of a prompt workers hold."""

    async def overlaps(
        self, targets: Targets, keys: Mapping[Partition, Sequence[bytes]], images: Sequence[bytes]
    ) -> Overlaps:
        """Return how much of a prompt *targets* hold.

        *keys* are its block keys in each partition, or empty if only images are wanted; *images* are the keys of its
        images (index.image_key). Does not raise: if the index is out of reach, no target is known.
        """


class LocalLookup:
    """Looks up in an index of this process; never waits."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._places: WeakKeyDictionary[Targets, tuple[int, NDArray[np.intp]]] = WeakKeyDictionary()

    async def overlaps(
        self, targets: Targets, keys: Mapping[Partition, Sequence[bytes]], images: Sequence[bytes]
    ) -> Overlaps:
        """Return the result of find()."""
        return self.find(targets, keys, images)

    def find(
        self, targets: Targets, keys: Mapping[Partition, Sequence[bytes]], images: Sequence[bytes] = ()
    ) -> Overlaps:
        """Return how much of a prompt *targets* hold."""
        index, places = self._index, self._places_of(targets)
        # A worker has one partition, so the look-ups in the others find nothing of it.
        lengths = sum((index.overlaps(*of_partition) for of_partition in keys.items()), np.zeros(1, np.int64))
        num_blocks = np.zeros(len(places), np.int64) if len(lengths) == 1 else lengths[places]
        have_images = index.have_images(images)[:, places] if images else np.zeros((0, len(places)), np.bool_)
        num_offloaded = np.zeros(len(places), np.int64)
        if keys and index.has_offloaded:
            in_all = sum((index.overlaps_with_offloaded(*one) for one in keys.items()), np.zeros(1, np.int64))
            num_offloaded = np.maximum(0, in_all - lengths)[places]
        return Overlaps(num_blocks, index.are_whole[places], have_images, num_offloaded)

    def _places_of(self, targets: Targets) -> NDArray[np.intp]:
        """Return the places of *targets* in the index, which stay until a worker begins or is forgotten."""
        known = self._places.get(targets)
        if known is None or known[0] != self._index.num_changes:
            known = self._index.num_changes, self._index.places_of(targets.names)
            self._places[targets] = known
        return known[1]
