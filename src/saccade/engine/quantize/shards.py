"""Write tensors into safetensors files of a limited size, with an index."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from saccade.engine.executor.weight_index import INDEX, WEIGHTS

SHARD_BYTES = 1 << 30
"""The size of a file in bytes, which is held in memory until it is written. A larger weight has a file of its own."""


def write_shards(folder: Path, weights: Iterable[dict[str, torch.Tensor]]) -> int:
    """Write *weights*, each of them some tensors by name, to *folder*, and return the number of bytes of all tensors.

    The tensors of a weight are in one file. Several files have an index.
    """
    file_of: dict[str, int] = {}
    total = count = 0
    for count, shard in enumerate(_shards(weights), 1):
        save_file(shard, folder / _part(count), metadata={"format": "pt"})
        file_of |= dict.fromkeys(shard, count)
        total += sum(tensor.nbytes for tensor in shard.values())
    names = {
        number: WEIGHTS if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        for number in range(1, count + 1)
    }
    for number, name in names.items():
        (folder / _part(number)).rename(folder / name)
    if count > 1:
        weight_map = {tensor: names[number] for tensor, number in file_of.items()}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _part(number: int) -> str:
    """Return the name of a file until the number of files is known."""
    return f"part-{number}"


def _shards(weights: Iterable[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for weight in weights:
        size = sum(tensor.nbytes for tensor in weight.values())
        if shard and num_bytes + size > SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard |= weight
        num_bytes += size
    if shard:
        yield shard
