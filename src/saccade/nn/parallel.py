"""Shares the parameters of one network among the processes that compute it together.

Tensor parallelism as in Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053): a matrix is cut by its outputs or by its
inputs. If it is cut by its inputs, the results are summed over the ranks.
"""

import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import environ
from typing import Literal, NamedTuple

import torch
from torch import distributed

from saccade.errors import StartupError

Split = Literal["outputs", "inputs"]


class Group:
    """A group of processes that communicate. `join` sets *handle*, which is None for all processes."""

    handle: distributed.ProcessGroup | None = None


@dataclass(frozen=True)
class Ranks:
    """This process's *rank* among *size* processes, which must have called `join` before any of them communicates.

    With *cuts_encoder*, the matrices of the vision encoder are cut too; otherwise each rank holds all of them.
    *attention_ranks* is None if attention is cut over all ranks. *setting* is the flag that chose the size.
    """

    rank: int = 0
    size: int = 1
    cuts_encoder: bool = False
    attention_ranks: "Ranks | None" = None
    setting: str = field(default="--tensor-parallel-size", repr=False)
    group: Group = field(default_factory=Group, repr=False, compare=False)

    def sharing_attention(self, size: int) -> "Ranks":
        """Return the same ranks with attention cut into *size* parts; several ranks may hold copies of one part.

        Ranks with the same part are neighbours, as for Sharding. *size* divides the number of ranks.
        """
        if size == self.size:
            return self
        place = self.rank * size // self.size
        return replace(self, attention_ranks=Ranks(place, size, setting="--attention-tensor-parallel-size"))

    @property
    def attention(self) -> "Ranks":
        """The ranks over which the text decoder's attention is cut, or the delta net that replaces it."""
        return self.attention_ranks or self

    @property
    def encoder(self) -> "Ranks":
        """The ranks over which the layers of the vision encoder are cut."""
        return self.attention if self.cuts_encoder else ALONE

    def share(self, count: int, what: str = "heads") -> int:
        """Return how many of *count* units one rank holds; if there are fewer units than ranks, neighbours hold copies.

        Raises StartupError if neither number divides the other.
        """
        if count % self.size and self.size % count:
            raise self._cannot_share(count, what)
        return max(1, count // self.size)

    def divide(self, count: int, what: str = "heads") -> int:
        """Return how many of *count* units one rank holds; no rank may hold a copy of another's.

        Results that the ranks sum, such as those of query heads, would count twice. Raises StartupError.
        """
        if count % self.size:
            raise self._cannot_share(count, what)
        return count // self.size

    def sharing(self, count: int) -> "Ranks":
        """Return these ranks if each can hold an equal part of *count* units; otherwise a single rank."""
        return ALONE if count % self.size else self

    def _cannot_share(self, count: int, what: str) -> StartupError:
        return StartupError(
            f"{self.setting} is {self.size}, but the model has {count} {what}, which {self.size} ranks "
            "cannot share equally."
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of *x* over all ranks; may overwrite *x*."""
        if self.size > 1:
            distributed.all_reduce(x, group=self.group.handle)
        return x

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite *x* with the *x* of rank *source*, and return it. Shapes and dtypes must be equal."""
        if self.size > 1:
            distributed.broadcast(x, source)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """On rank 0, return the columns of all ranks' *x* [N, C] side by side; on other ranks, return *x*."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        distributed.gather(x, parts, dst=0)
        return x if parts is None else torch.cat(parts, 1)

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. The host waits until every rank has made this call."""
        if self.size == 1:
            return list(flags)
        maxima = torch.tensor(flags, dtype=torch.int64)
        distributed.all_reduce(maxima, distributed.ReduceOp.MAX)
        return [bool(flag) for flag in maxima.tolist()]


ALONE = Ranks()


def join(ranks: Ranks, rendezvous: str, device: torch.device) -> None:
    """Connect this process with the other ranks; return when all of them have called. Raises RuntimeError.

    *rendezvous* is the path of an empty file that all ranks can write to, and no other user can. Host tensors go over
    gloo and GPU tensors over NCCL; both use only the sockets of the loopback interface.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    environ["GLOO_SOCKET_IFNAME"] = environ["NCCL_SOCKET_IFNAME"] = loopback
    is_cuda = device.type == "cuda"
    excepthook = sys.excepthook
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=distributed.FileStore(rendezvous, ranks.size),  # type: ignore[attr-defined]
        rank=ranks.rank,
        world_size=ranks.size,
        device_id=device if is_cuda else None,
    )
    _join_attention(ranks)
    # torch replaced it by one that writes to stderr.
    sys.excepthook = excepthook
    distributed.barrier(device_ids=[device.index] if is_cuda else None)


def _join_attention(ranks: Ranks) -> None:
    """Connect the ranks that share attention, unless that is every rank or a single one. All ranks make all groups."""
    if not 1 < ranks.attention.size < ranks.size:
        return
    copies = ranks.size // ranks.attention.size
    for first in range(copies):
        group = distributed.new_group([*range(first, ranks.size, copies)])
        if ranks.rank % copies == first:
            ranks.attention.group.handle = group


def leave() -> None:
    """Undo `join`."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


class PartSlice(NamedTuple):
    """Entries [source, source + length) of part number *part* go to [start, start + length) of a rank's parameter."""

    part: int
    source: int
    start: int
    length: int


@dataclass(frozen=True)
class Sharding:
    """How the dimension *dim* of a full tensor is cut over ranks.

    The dimension consists of consecutive *parts*, in entries. Part i is cut into shards[i] equal shards; with fewer
    shards than ranks, neighbouring ranks hold copies. Without *shards*, every rank holds everything.
    """

    parts: tuple[int, ...]
    dim: int = 0
    shards: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise StartupError for a part that cannot be cut into equal shards."""
        for part, count in zip(self.parts, self.shards, strict=False):
            if part % count:
                raise StartupError(
                    f"--tensor-parallel-size: a matrix with {part} rows or columns cannot be cut into {count} equal "
                    "shards."
                )

    def lengths(self) -> tuple[int, ...]:
        """Return the number of entries of each part that one rank holds."""
        shards = self.shards or (1,) * len(self.parts)
        return tuple(part // count for part, count in zip(self.parts, shards, strict=True))

    def pieces(self, ranks: Ranks) -> Iterator[PartSlice]:
        """Yield the pieces of a rank's parameter, part by part. *source* counts from the part's start."""
        start = 0
        shards = self.shards or (1,) * len(self.parts)
        for part, (length, count) in enumerate(zip(self.lengths(), shards, strict=True)):
            yield PartSlice(part, ranks.rank * count // ranks.size * length, start, length)
            start += length


def shards_of(units: int, ranks: Ranks) -> int:
    """Return the number of shards for *units* heads. Raises StartupError if the ranks cannot share them equally."""
    ranks.share(units)
    return min(units, ranks.size)
