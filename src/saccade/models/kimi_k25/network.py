"""Kimi-K2.5's network: the vision tower, projector and text decoder."""

from saccade.models.backbones.deepseek_text import DeepseekTextDecoder
from saccade.models.backbones.merging_network import MergingNetwork
from saccade.models.backbones.moonvit import MoonVitTower
from saccade.models.kimi_k25.layout import Layout
from saccade.models.kimi_k25.weights import target
from saccade.models.network import Target


class Network(MergingNetwork):
    """The family's network in the engine. Parameters are empty until the loader has filled them and called `finish`."""

    layout, tower, decoder = Layout, MoonVitTower, DeepseekTextDecoder

    def target(self, name: str) -> Target | None:
        """Return the parameter for the release's tensor *name*; None for draft layers."""
        return target(name, self.spec.text)
