"""Look up how much of a prompt each worker is known to hold, before the choice of a worker.

An index may be in another process, so a look-up may wait. Choosing and booking (saccade.fleet.router) must not: they
get the result as a value.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from saccade.fleet.index import BlockIndex, Partition


class Overlap(NamedTuple):
    """The number of leading blocks of a prompt that a worker reported; *is_exact*: all that it holds is known."""

    num_blocks: int = 0
    is_exact: bool = False


UNKNOWN = Overlap()
"""The overlap of a worker that reports nothing."""


class LookupTarget(NamedTuple):
    """A worker to look up, and the partition of its keys."""

    name: str
    partition: Partition


class Lookup(Protocol):
    """Finds how much of a prompt workers hold."""

    async def overlaps(
        self, targets: Sequence[LookupTarget], keys: Mapping[Partition, Sequence[bytes]]
    ) -> Mapping[str, Overlap]:
        """Return by name how much of a prompt *targets* hold; *keys* are its block keys in each partition.

        A missing target is not known. Does not raise: if the index is out of reach, no target is known.
        """


class LocalLookup:
    """Looks up in an index of this process; never waits."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index

    async def overlaps(
        self, targets: Sequence[LookupTarget], keys: Mapping[Partition, Sequence[bytes]]
    ) -> Mapping[str, Overlap]:
        """Return the result of find()."""
        return self.find(targets, keys)

    def find(self, targets: Sequence[LookupTarget], keys: Mapping[Partition, Sequence[bytes]]) -> Mapping[str, Overlap]:
        """Return by name how much of a prompt *targets* hold."""
        index = self._index
        overlaps = {partition: index.overlaps(partition, keys) for partition, keys in keys.items()}
        return {
            name: Overlap(overlaps.get(partition, {}).get(name, 0), index.is_exact(name)) for name, partition in targets
        }
