"""SigLIP's tower for images of any size, and ERNIE 4.5's decoder.

Formulas: transformers 5.23, modeling_paddleocr_vl.py. Shapes: P patches, E hidden size, U merged patches, X text width.
"""

import torch

from saccade.models.backbones.merging_network import MergingNetwork
from saccade.models.backbones.merging_tower import LearnedTower, PatchMerger
from saccade.models.backbones.vision_mlp import VisionMlp
from saccade.models.paddleocr_vl.layout import Layout
from saccade.models.paddleocr_vl.spec import TowerConfig
from saccade.models.paddleocr_vl.weights import target
from saccade.nn.layers import LayerNorm
from saccade.nn.parallel import Ranks
from saccade.nn.vision import centred_taps

PROJECTOR_EPS = 1e-5


class Projector(PatchMerger):
    """The tower's last norm, and the projector, which has its own norm."""

    def __init__(self, config: TowerConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks, norm_eps=PROJECTOR_EPS)
        self.post_layernorm = LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x_PE: torch.Tensor) -> torch.Tensor:
        """Map [P, E] to [U, X]."""
        return super().forward(self.post_layernorm(x_PE))


class Tower(LearnedTower):
    """SigLIP's tower, whose learned positions are resampled with aligned edges."""

    mlp = VisionMlp
    tap_rule = staticmethod(centred_taps)
    config: TowerConfig

    def make_merger(self, ranks: Ranks) -> Projector:
        return Projector(self.config, ranks)


class Network(MergingNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout, tower, target = Layout, Tower, staticmethod(target)
