"""The networks of Qwen's families: each is a tower and a decoder."""

from saccade.models.backbones.hybrid_text import HybridDecoder
from saccade.models.backbones.merging_network import MergingNetwork
from saccade.models.backbones.merging_tower import MergingTower
from saccade.models.qwen_vl import weights
from saccade.models.qwen_vl.layout import Layout14, Layout16
from saccade.models.qwen_vl.towers import Tower3, WindowedTower


class Network2(MergingNetwork):
    """Qwen2-VL."""

    layout, tower, target = Layout14, MergingTower, staticmethod(weights.target2)


class WindowedNetwork(MergingNetwork):
    """Qwen2.5-VL."""

    layout, tower, target = Layout14, WindowedTower, staticmethod(weights.target2)


class Network3(MergingNetwork):
    """Qwen3-VL."""

    layout, tower, target = Layout16, Tower3, staticmethod(weights.target3)


class HybridNetwork(MergingNetwork):
    """Qwen3.5."""

    layout, tower, target = Layout16, Tower3, staticmethod(weights.hybrid_target)
    decoder = HybridDecoder
