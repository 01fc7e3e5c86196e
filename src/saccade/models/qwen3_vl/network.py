"""The network: a tower with learned positions and deepstack features, and a text decoder that may have experts."""

from collections.abc import Mapping
from typing import Any

from saccade.models.backbones.model_config import section
from saccade.models.backbones.qwen_network import QwenNetwork
from saccade.models.backbones.qwen_vision import VisionTower
from saccade.models.network import Target
from saccade.models.qwen3_vl.facts import Facts
from saccade.models.qwen3_vl.layout import Layout
from saccade.models.qwen3_vl.weights import locate
from saccade.nn.parallel import ALONE, Ranks


class Network(QwenNetwork):
    """The engine's network of the family."""

    def __init__(
        self, facts: Facts, config: Mapping[str, Any], preprocessor: Mapping[str, Any], ranks: Ranks = ALONE
    ) -> None:
        settings = Layout(config, preprocessor).settings
        within = section(config, "text_config").get("tie_word_embeddings", False)
        tied = bool(config.get("tie_word_embeddings", within))
        super().__init__(facts, VisionTower(facts.vision, ranks.encoder), settings, tied=tied, ranks=ranks)

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None if the tensor is not needed."""
        return locate(name, self.tied)
