"""How much of a prompt each worker is known to hold: asked before the choice, and apart from it.

An index may live in another process, so asking may wait. Choosing and booking (saccade.routing.router) must not: they
get the answer as a value.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from saccade.routing.index import BlockIndex, Partition


class Overlap(NamedTuple):
    """How many leading blocks of a prompt a worker has reported to hold; *is_exact*: all that it holds is known."""

    num_blocks: int = 0
    is_exact: bool = False


UNKNOWN = Overlap()
"""Of a worker that reports nothing."""


class LookupTarget(NamedTuple):
    """A worker to look up, and what its keys mean."""

    name: str
    partition: Partition


class Lookup(Protocol):
    """Finds what workers hold of a prompt."""

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
        """Return by name what *targets* hold."""
        return self.find(targets, keys)

    def find(self, targets: Sequence[LookupTarget], keys: Mapping[Partition, Sequence[bytes]]) -> Mapping[str, Overlap]:
        """Return what overlaps() does."""
        index = self._index
        overlaps = {partition: index.overlaps(partition, keys) for partition, keys in keys.items()}
        return {
            name: Overlap(overlaps.get(partition, {}).get(name, 0), index.is_exact(name)) for name, partition in targets
        }
