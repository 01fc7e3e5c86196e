"""The MLP of vision towers. Shapes: P patches, E hidden size."""

import torch
from torch import nn

from saccade.models.backbones.vision_config import VisionConfig
from saccade.nn.layers import Linear
from saccade.nn.ops import ACTIVATIONS
from saccade.nn.parallel import Ranks


class VisionMlp(nn.Module):
    """Two linear layers with biases, called *names* in checkpoints, and an activation between them."""

    names = ("fc1", "fc2")

    def __init__(self, config: VisionConfig, ranks: Ranks) -> None:
        super().__init__()
        widths = config.hidden_size, config.intermediate_size
        self.add_module(self.names[0], Linear(*widths, split="outputs", ranks=ranks))
        self.add_module(self.names[1], Linear(*widths[::-1], split="inputs", ranks=ranks))
        self.activation = ACTIVATIONS[config.activation]

    def add_to(self, residual_PE: torch.Tensor, x_PE: torch.Tensor) -> torch.Tensor:
        """Return *residual_PE* plus the MLP of *x_PE*."""
        first, second = (getattr(self, name) for name in self.names)
        return second.add_to(residual_PE, first(x_PE, self.activation))  # type: ignore[no-any-return]
