"""Functions of one value behind a linear layer."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch.nn import functional


class Activation(NamedTuple):
    """A function of one value, and oneDNN's name for it."""

    function: Callable[[torch.Tensor], torch.Tensor]
    attribute: str
    algorithm: str = ""


IDENTITY = Activation(lambda x: x, "none")
GELU = Activation(functional.gelu, "gelu", "none")
GELU_TANH = Activation(partial(functional.gelu, approximate="tanh"), "gelu", "tanh")
SILU = Activation(functional.silu, "swish")
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"gelu_pytorch_tanh": GELU_TANH, "gelu": GELU, "silu": SILU})
"""By the names that config.json has for them."""
