"""Finds a checkpoint's scales for cached keys and values, by the names that quantisation tools use.

A scale belongs to an attention layer or to one of its matrices. Older tools write one for both keys and values.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from saccade.engine.executor.weight_files import Checkpoint, StoredTensor
from saccade.errors import StartupError
from saccade.models.backbones.text_network import LAYER

CACHE_SCALE = re.compile(
    r"(?P<attention>.*\.layers\.\d+\.[^.]*attn)\."
    r"(?:(?:[^.]+\.)?(?P<which>kv|k|v|q|prob)(?:_output)?_scale|(?P<matrix>[kvq])_proj\.output_scale)"
)
KEYS, VALUES = "k", "v"
PARTS: Mapping[str, str] = {"k": KEYS, "v": VALUES, "kv": KEYS + VALUES}
"""What a scale is of. Those of queries and probabilities are for arithmetic in float8."""


@dataclass(frozen=True)
class CacheScales:
    """Scale tensors, keyed by layer and "k" or "v".

    *spare* counts those that no arithmetic here needs, by the end of their names. *unexpected* are those of attention
    layers that the checkpoint does not have.
    """

    tensors: dict[tuple[int, str], list[StoredTensor]] = field(default_factory=lambda: defaultdict(list))
    spare: Counter[str] = field(default_factory=Counter)
    unexpected: list[StoredTensor] = field(default_factory=list)

    def note(self, scales: Iterable[StoredTensor], network: Any, siblings: Mapping[str, str]) -> None:
        """Sort *scales* into these groups. *siblings* maps an attention layer's name to that of one of its weights."""
        for tensor in scales:
            match = CACHE_SCALE.fullmatch(tensor.name)
            sibling = None if match is None else siblings.get(match["attention"])
            if match is None or sibling is None:
                self.unexpected.append(tensor)
                continue
            target, which = network.locate(sibling), match["which"] or match["matrix"]
            layer = None if target is None else LAYER.search(target.parameter)
            if layer is None or which not in PARTS:
                # A draft layer's cache has no scales.
                self.spare[tensor.name.rpartition(".")[2]] += 1
                continue
            for part in PARTS[which]:
                self.tensors[int(layer[1]), part].append(tensor)

    def read_scales(self, checkpoint: Checkpoint) -> dict[int, tuple[float, float]]:
        """Return the scales of keys and values by layer; a missing one is 1. Raises StartupError."""
        scales = {key: _one(list(_values(tensors, checkpoint))) for key, tensors in self.tensors.items()}
        return {layer: (scales.get((layer, KEYS), 1.0), scales.get((layer, VALUES), 1.0)) for layer, _ in scales}


def _values(tensors: Iterable[StoredTensor], checkpoint: Checkpoint) -> Iterator[tuple[StoredTensor, float]]:
    for tensor in tensors:
        scale = checkpoint.read(tensor.name)
        if scale.numel() != 1 or not 0 < scale.item() < float("inf"):
            raise StartupError(f"{tensor.file}: the tensor {tensor.name} must be one positive number.")
        yield tensor, scale.item()


def _one(values: list[tuple[StoredTensor, float]]) -> float:
    (first, scale), *others = values
    for tensor, other in others:
        if other != scale:
            raise StartupError(f"{first.name} is {scale} and {tensor.name} is {other}: both scale the same cache.")
    return scale
