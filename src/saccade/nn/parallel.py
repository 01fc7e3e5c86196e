"""How the processes that compute one network together share its parameters.

Tensor parallelism as in Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053): a matrix is cut by its outputs or by its
inputs, and the results of a matrix that is cut by its inputs are summed over the ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from saccade.errors import StartupError

Split = Literal["outputs", "inputs"]


@dataclass(frozen=True)
class Ranks:
    """This process's *rank* among *size* processes."""

    rank: int = 0
    size: int = 1

    def share(self, count: int, what: str = "heads") -> int:
        """Return how many of *count* units one rank holds; with fewer units than ranks, neighbours hold copies of one.

        Raises StartupError if neither number divides the other.
        """
        if count % self.size and self.size % count:
            raise StartupError(
                f"--tensor-parallel-size is {self.size}, but the model has {count} {what}, which {self.size} ranks "
                "cannot share equally."
            )
        return max(1, count // self.size)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of *x* over all ranks; may overwrite *x*."""
        if self.size == 1:
            return x
        torch.distributed.all_reduce(x)
        return x


ALONE = Ranks()


class Piece(NamedTuple):
    """Entries [source, source + length) of part number *part* go to [start, start + length) of a rank's parameter."""

    part: int
    source: int
    start: int
    length: int


@dataclass(frozen=True)
class Sharding:
    """How dimension *dim* of a full tensor is cut over ranks.

    The dimension consists of consecutive *parts*, in entries. Part i is cut into shards[i] equal shards; with fewer
    shards than ranks, neighbouring ranks hold copies. Without *shards* every rank holds everything.
    """

    parts: tuple[int, ...]
    dim: int = 0
    shards: tuple[int, ...] = ()

    def lengths(self) -> tuple[int, ...]:
        """Return the number of entries of each part that one rank holds."""
        shards = self.shards or (1,) * len(self.parts)
        return tuple(part // count for part, count in zip(self.parts, shards, strict=True))

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        """Return what the parameter of a rank consists of, part by part. *source* counts from the part's start."""
        start = 0
        shards = self.shards or (1,) * len(self.parts)
        for part, (length, count) in enumerate(zip(self.lengths(), shards, strict=True)):
            yield Piece(part, ranks.rank * count // ranks.size * length, start, length)
            start += length


def shards_of(units: int, ranks: Ranks) -> int:
    """Return into how many shards *units* heads are cut. Raises StartupError if the ranks cannot share them equally."""
    ranks.share(units)
    return min(units, ranks.size)
