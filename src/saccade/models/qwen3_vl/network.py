"""The network: a tower with learned positions and deepstack features, and a text decoder that may have experts."""

from saccade.models.backbones.qwen_network import QwenNetwork
from saccade.models.backbones.qwen_vision import VisionTower
from saccade.models.network import Target
from saccade.models.qwen3_vl.layout import Layout
from saccade.models.qwen3_vl.weights import locate


class Network(QwenNetwork):
    """The engine's network of the family."""

    layout = Layout
    tower = VisionTower

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""
        return locate(name, self.loads_head)
