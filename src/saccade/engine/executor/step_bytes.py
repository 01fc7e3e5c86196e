"""How many bytes of weights a step with one token reads: on a CPU, no step is faster than reading them."""

from itertools import chain

import torch
from torch import nn

from saccade.models.backbones.text_network import TextNetwork
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedLinear
from saccade.nn.layers import Linear
from saccade.nn.ops import JoinedLinear, PackedLinear


def step_bytes(network: nn.Module) -> int:
    """Return the bytes of the linear layers in the text decoder and the head of a packed *network*.

    0 if they do not tell: a token of a mixture of experts reads only some of its layers, and a weight that is
    dequantised at each use is read several times.
    """
    if not isinstance(network, TextNetwork):
        return 0
    heads = () if network.lm_head is None else network.lm_head.modules()
    layers = list(chain(network.language_model.modules(), heads))
    packed = [layer.packed for layer in layers if isinstance(layer, Linear) and layer.packed is not None]
    if any(isinstance(layer, Experts) for layer in layers) or any(isinstance(one, QuantisedLinear) for one in packed):
        return 0
    return sum(map(packed_bytes, packed))


def packed_bytes(packed: PackedLinear) -> int:
    """Return the bytes of all tensors of *packed*."""
    if isinstance(packed, JoinedLinear):
        return sum(map(packed_bytes, packed.layers))
    tensors = (value for value in vars(packed).values() if isinstance(value, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
