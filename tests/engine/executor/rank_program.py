"""A program for one of several ranks: python rank_program.py RANK SIZE RENDEZVOUS; each runs the same cases.

It spreads images with a stand-in for a network over the ranks, or cuts the network, and prints what this rank holds then, as JSON. Two of
four ranks or more share attention.
"""

import json
import sys
from dataclasses import replace
from typing import Any

import torch

from saccade.engine.core.step import EncoderInput, EncoderSlice
from saccade.engine.executor.encoder import Encoder
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import Ranks, join, leave

WIDTH = 6
CASES: dict[str, list[tuple[int, int, int]]] = {
    "idle rank": [(1, 2, 3)],
    "equal": [(1, 2, 2), (1, 2, 2)],
    "uneven": [(1, 4, 4), (1, 1, 1), (1, 2, 3), (1, 5, 1)],
    "one fails on rank 0": [(1, 7, 7), (1, 2, 3)],
    "one fails on rank 1": [(1, 8, 8), (1, 7, 7), (1, 1, 2)],
}
BAD = (1, 7, 7)
CUT_CASES: dict[str, list[tuple[int, int, int]]] = {
    "cut, all well": [(1, 2, 2), (1, 1, 3)],
    "cut, one fails on rank 1": [(1, 2, 2), (1, 7, 7), (1, 1, 3)],
    "cut, only one that fails": [(1, 7, 7)],
    "cut, too many together": [(1, 2, 2)] * 4,
}
MOST_TOGETHER = 3


class Spec:
    """A token for each patch, WIDTH values each: main features and those of a deepstack layer."""

    def item_tokens(self, grid: tuple[int, int, int], original_size: Any = None) -> int:
        return grid[1] * grid[2]

    def encoder_output_values(self, grid: tuple[int, int, int], original_size: Any = None) -> int:
        return self.item_tokens(grid) * WIDTH

    def encode_cost(self, grid: tuple[int, int, int]) -> int:
        return self.item_tokens(grid)


class Network:
    """The features of a token are its image's pixel, and the column. If the encoder is cut, all *ranks* encode.

    An image that cannot be encoded fails on its rank, or on rank 1 alone.
    """

    spec = Spec()
    device = torch.device("cpu")
    dtype = torch.float32
    num_encoded = 0

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def prepare(self, items: Any, backend: Any) -> list[int]:
        fails_here = self.ranks.rank == 1 or not self.ranks.cuts_encoder
        if fails_here and any(item.grid == BAD for item in items):
            raise RuntimeError("an image that cannot be encoded")
        if len(items) > MOST_TOGETHER:
            raise RuntimeError("no memory")
        return [self.spec.item_tokens(item.grid) for item in items]

    def encode(self, pixels: torch.Tensor, counts: list[int]) -> Layerwise:
        self.num_encoded += len(counts)
        yield
        tokens = pixels.float().repeat_interleave(torch.tensor(counts))
        features = tokens.unsqueeze(1) * 100 + torch.arange(WIDTH)
        # A rank that did not come would be waited for.
        return self.ranks.all_reduce(features) / self.ranks.size if self.ranks.cuts_encoder else features


def in_slices(ranks: Ranks) -> Any:
    """What a rank holds after two images in slices, the second of which one rank cannot begin, and a whole image."""
    encoder = Encoder(Network(ranks), None, ranks)  # type: ignore[arg-type]
    grids = [(1, 2, 2), BAD, (1, 1, 3)]
    images = [EncoderInput(10 + i, "image", grid, None, bytes([i + 1])) for i, grid in enumerate(grids)]
    begun = encoder.encode(images, [EncoderSlice(10, 1), EncoderSlice(11, 1)])
    ended = encoder.encode([], [EncoderSlice(10, None), EncoderSlice(11, None)])
    features = {key: part.tolist() for key, part in (begun.features | ended.features).items()}
    return {"features": features, "failed": [begun.failed, ended.failed]}


def main() -> None:
    rank, size, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    whole = Ranks(rank, size).sharing_attention(min(size, 2))
    join(whole, rendezvous, torch.device("cpu"))
    found = {}
    for name, grids in (CASES | CUT_CASES).items():
        ranks = replace(whole, cuts_encoder=name in CUT_CASES)
        network: Any = Network(ranks)
        images = tuple(EncoderInput(10 + i, "image", grid, None, bytes([i + 1])) for i, grid in enumerate(grids))
        outcome = Encoder(network, None, ranks).encode(images)  # type: ignore[arg-type]
        features = {key: outcome.features[key].tolist() for key in sorted(outcome.features)}
        found[name] = {"features": features, "failed": outcome.failed, "num_encoded": network.num_encoded}
    for name, cuts in (("in slices", False), ("in slices, cut", True)):
        found[name] = in_slices(replace(whole, cuts_encoder=cuts))
    found["sum"] = whole.all_reduce(torch.tensor([1.0, rank])).tolist()
    found["attention"] = whole.attention.all_reduce(torch.tensor([1.0, rank])).tolist()
    found["from 1"] = whole.broadcast(torch.tensor([rank, 7]), 1).tolist()
    leave()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
