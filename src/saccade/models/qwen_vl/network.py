"""The networks of Qwen's families. Each is a tower and a decoder; Qwen3.5's may also have a draft layer."""

import torch

from saccade.models.backbones.draft_layer import DraftLayer
from saccade.models.backbones.hybrid_text import HybridDecoder
from saccade.models.backbones.merging_network import MergingNetwork
from saccade.models.backbones.merging_tower import MergingTower
from saccade.models.network import Target
from saccade.models.qwen_vl import weights
from saccade.models.qwen_vl.layout import Layout14, Layout16
from saccade.models.qwen_vl.spec import HybridSpec
from saccade.models.qwen_vl.towers import Tower3, WindowedTower
from saccade.nn.context import ForwardContext
from saccade.nn.parallel import Ranks


class Network2(MergingNetwork):
    """The network of Qwen2-VL."""

    layout, tower, target = Layout14, MergingTower, staticmethod(weights.target2)


class WindowedNetwork(MergingNetwork):
    """The network of Qwen2.5-VL."""

    layout, tower, target = Layout14, WindowedTower, staticmethod(weights.target2)


class Network3(MergingNetwork):
    """The network of Qwen3-VL."""

    layout, tower, target = Layout16, Tower3, staticmethod(weights.target3)


class HybridNetwork(MergingNetwork):
    """The network of Qwen3.5."""

    layout, tower, decoder = Layout16, Tower3, HybridDecoder
    mtp: DraftLayer | None

    def build(self, spec: HybridSpec, ranks: Ranks) -> None:
        """Create the tower and, if it is used, the draft layer, under its name in the releases."""
        super().build(spec, ranks)
        self.mtp = DraftLayer(spec.text, ranks) if spec.drafts else None

    def target(self, name: str) -> Target | None:
        """Return the parameter for the release's tensor *name*; None if it is not needed."""
        return weights.hybrid_target(name, drafts=self.spec.drafts)

    def draft(
        self, x_NE: torch.Tensor, hidden_NE: torch.Tensor, context: ForwardContext, *, attends: bool = True
    ) -> torch.Tensor:
        """Return the draft layer's states [N, E]. See models.network.Network."""
        if self.mtp is None:
            raise ValueError("the network was made without its draft layer")
        rotation = self.language_model.rotation_at(context.positions, x_NE.dtype)
        return self.mtp(x_NE, hidden_NE, rotation, context, attends=attends)  # type: ignore[no-any-return]
