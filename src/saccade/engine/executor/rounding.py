"""Round plain weights to the nearest values of a format, for --quantization and `saccade quantize`."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from saccade.models.backbones.decoder import TextDecoder
from saccade.nn.experts import Experts
from saccade.nn.formats import fp8
from saccade.nn.formats.int8 import rounded_rows
from saccade.nn.formats.packed_ints import rounded_groups
from saccade.nn.formats.quantised import QuantisedWeight
from saccade.nn.layers import Linear

FP8, INT8, INT4 = "fp8", "int8", "int4"
"""The values of --quantization, which also name the formats of single layers."""

GROUP_SIZE = 64
"""The columns of a group of INT4."""

HEAD = "lm_head"
"""The layer that computes the logits."""

ROUNDED: Mapping[str, Callable[[torch.Tensor], QuantisedWeight]] = MappingProxyType(
    {FP8: fp8.rounded, INT8: rounded_rows, INT4: partial(rounded_groups, group_size=GROUP_SIZE)}
)
"""How a weight is rounded to each format."""


def formats_of_layers(network: Any, choice: str) -> Mapping[str, str]:
    """Return the format of each layer of *network* that *choice*, a value of --quantization, rounds, by its name.

    Call it before `finish`; the parameters need no storage. fp8 rounds the text decoder's layers and experts, in
    blocks. int8 rounds all other layers too, row by row, but no experts. int4 does the same, with groups of GROUP_SIZE
    columns in the decoder's layers, unless the columns do not make whole groups.
    """
    of_decoder = set(_modules_of_decoders(network))
    formats = {}
    for name, layer in network.named_modules():
        if isinstance(layer, Experts) and layer in of_decoder and choice == FP8:
            formats[name] = FP8
        elif isinstance(layer, Linear) and layer.is_worth_rounding:
            # A router is not cut over ranks.
            if layer in of_decoder and layer.split is not None:
                formats[name] = INT8 if choice == INT4 and layer.weight.shape[1] % GROUP_SIZE else choice
            elif layer not in of_decoder and choice != FP8:
                formats[name] = INT8
    if network.is_tied and choice != FP8 and Linear.of(network.language_model.embedding_VE).is_worth_rounding:
        formats[HEAD] = INT8
    return formats


def rounding(network: Any, choice: str | None) -> Callable[[str], None]:
    """Return a function that rounds the layer whose name it gets to *choice*, a value of --quantization.

    Call it for each layer that has its weights, before `finish`. A tied head is rounded when the embedding is loaded,
    which stays as it is. With None, the function does nothing.
    """
    formats = {} if choice is None else formats_of_layers(network, choice)

    def round_layer(name: str) -> None:
        layer = network.get_submodule(name)
        if layer is network.language_model.embed_tokens and network.is_tied and HEAD in formats:
            network.make_tied_head()
            name, layer = HEAD, network.lm_head
        if name not in formats:
            return
        if isinstance(layer, Experts):
            layer.round_to_fp8()
        else:
            layer.round_weight(ROUNDED[formats[name]])

    return round_layer


def bytes_saved(network: Any) -> int:
    """Return how many bytes --quantization int8 would save of the weights of *network*, which are all plain.

    A tied head is left out: its plain copy exists only if a kernel packs it.
    """
    names = (name for name in formats_of_layers(network, INT8) if name != HEAD or not network.is_tied)
    layers = [network.get_submodule(name) for name in names]
    return sum(layer.weight.nbytes - layer.weight.numel() for layer in layers)


def _modules_of_decoders(network: nn.Module) -> Iterator[nn.Module]:
    for decoder in (module for module in network.modules() if isinstance(module, TextDecoder)):
        yield from decoder.layers.modules()
