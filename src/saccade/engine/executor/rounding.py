"""Round the plain weights of a loaded network to the nearest values of a format, for --quantization."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn

from saccade.models.backbones.decoder import TextDecoder
from saccade.nn.experts import Experts
from saccade.nn.formats import fp8
from saccade.nn.formats.int8 import rounded_rows
from saccade.nn.formats.packed_ints import rounded_groups
from saccade.nn.formats.quantised import QuantisedWeight
from saccade.nn.layers import Linear

FP8 = "fp8"
"""The choice that rounds the text decoder alone, with its experts; the others have kernels for CPUs alone."""

GROUP_SIZE = 64
"""The columns of a group of INT4."""


def round_weights(network: nn.Module, choice: str) -> None:
    """Round weights of *network* to *choice*, a value of --quantization; routers and small weights stay plain.

    fp8 rounds the text decoder's layers and experts, in blocks. int8 rounds all other layers too, row by row, but no
    experts. int4 does the same, with groups of GROUP_SIZE columns in the decoder's layers.
    """
    of_decoder = set(_modules_of_decoders(network))
    for layer in network.modules():
        if isinstance(layer, Linear):
            # A router is not cut over ranks.
            if layer in of_decoder and layer.split is not None:
                layer.round_weight(ROUNDED[choice])
            elif layer not in of_decoder and choice != FP8:
                layer.round_weight(rounded_rows)
        elif isinstance(layer, Experts) and layer in of_decoder and choice == FP8:
            layer.round_to_fp8()


def _modules_of_decoders(network: nn.Module) -> Iterator[nn.Module]:
    for decoder in (module for module in network.modules() if isinstance(module, TextDecoder)):
        yield from decoder.layers.modules()


def _in_groups(weight_OI: torch.Tensor) -> QuantisedWeight:
    """Round a weight to four bits, or to eight if its columns do not make whole groups."""
    return rounded_rows(weight_OI) if weight_OI.shape[1] % GROUP_SIZE else rounded_groups(weight_OI, GROUP_SIZE)


ROUNDED: Mapping[str, Callable[[torch.Tensor], QuantisedWeight]] = MappingProxyType(
    {FP8: fp8.rounded, "int8": rounded_rows, "int4": _in_groups}
)
"""How the decoder's layers are rounded, by the value of --quantization."""
