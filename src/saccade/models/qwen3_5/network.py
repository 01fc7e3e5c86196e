"""The network: a tower with learned positions, and a text decoder of delta nets and gated attention."""

from saccade.models.backbones.hybrid_text import HybridDecoder
from saccade.models.backbones.qwen_network import QwenNetwork
from saccade.models.backbones.qwen_vision import VisionTower
from saccade.models.network import Target
from saccade.models.qwen3_5.layout import Layout
from saccade.models.qwen3_5.weights import locate


class Network(QwenNetwork):
    """The engine's network of the family."""

    layout = Layout
    tower = VisionTower
    decoder = HybridDecoder

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""
        return locate(name, self.loads_head)
