"""The networks of the families: each is a tower and GLM-4's decoder."""

from saccade.models.backbones.merging_network import MergingNetwork
from saccade.models.glm_v.layout import Layout
from saccade.models.glm_v.text import GlmDecoder
from saccade.models.glm_v.tower import OcrTower, Tower
from saccade.models.glm_v.weights import target
from saccade.models.network import Target


class GlmNetwork(MergingNetwork):
    """The base of both networks. A family adds its *tower*."""

    layout, decoder = Layout, GlmDecoder

    def target(self, name: str) -> Target | None:
        """Return the parameter for the release's tensor *name*; None for a draft layer's."""
        return target(name, self.spec.text.num_layers)


class Network(GlmNetwork):
    """The network of GLM-4.1V, 4.5V and 4.6V."""

    tower = Tower


class OcrNetwork(GlmNetwork):
    """The network of GLM-OCR."""

    tower = OcrTower
