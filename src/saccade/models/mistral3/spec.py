"""The spec for the engine's core, read from config.json. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Self

from saccade.models.backbones.grid_spec import MergedPatchSpec
from saccade.models.backbones.model_config import check_equal, choice, flag, section, values_of
from saccade.models.backbones.rope_scaling import rope_section
from saccade.models.backbones.text_config import MINISTRAL, MISTRAL, TIED, TextConfig, TextStyle, text_section
from saccade.models.backbones.vision_config import MergingVisionConfig
from saccade.models.mistral3 import FAMILY
from saccade.models.mistral3.layout import merge_size
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import IMAGE

DEFAULT_IMAGE_TOKEN_ID = 10
STYLES: Mapping[str, TextStyle] = MappingProxyType({"mistral": MISTRAL, "ministral3": MINISTRAL})
"""By the model_type of `text_config`."""

FIXED: Mapping[str, Any] = MappingProxyType({"vision_feature_layer": -1, "projector_hidden_act": "gelu"})
"""Settings of config.json with one supported value, which is also their default."""

FIXED_VISION: Mapping[str, Any] = MappingProxyType({"model_type": "pixtral", "num_channels": CHANNELS})
"""The same of its vision tower."""

SILENT_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
        "hidden_act": "gelu",
        "rope_theta": 10000.0,
    }
)
"""The defaults of transformers' PixtralVisionConfig."""


@dataclass(frozen=True, kw_only=True)
class TowerConfig(MergingVisionConfig):
    """Pixtral's tower, with *rope_theta* as the base of its rotary frequencies, and the projector after it."""

    rope_theta: Annotated[float, "rope_theta"]
    projector_eps: float
    projector_bias: bool
    norm_eps: float = 1e-5

    @classmethod
    def read_vision(cls, config: Mapping[str, Any], text: TextConfig) -> Self:
        """Read `vision_config` and the *config* around it. *text* is the decoder's. Raises StartupError."""
        stated = section(config, "vision_config")
        vision = {**SILENT_VISION, **stated, **rope_section(stated)}
        check_equal(config, FIXED)
        check_equal(vision, FIXED_VISION)
        tower = cls(
            **values_of(cls, vision),
            activation=choice(vision, "hidden_act", ("gelu", "silu")),
            merge_size=merge_size(config),
            out_hidden_size=text.hidden_size,
            projector_eps=text.norm_eps,
            projector_bias=flag(config, "multimodal_projector_bias"),
        )
        tower.check_rotation("`num_attention_heads`")
        return tower


@dataclass(frozen=True)
class Spec(MergedPatchSpec):
    """Implements models.spec.ModelSpec, and holds the network's checked settings from config.json."""

    text: TextConfig
    vision: TowerConfig
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        section(config, "text_config")
        keys = text_section({**TIED, **config})
        kind = choice({"model_type": "mistral", **keys}, "model_type", tuple(STYLES))
        text = TextConfig.read_decoder(keys, STYLES[kind])
        token_id = FAMILY.placeholder_below(config, text.vocab_size, DEFAULT_IMAGE_TOKEN_ID)
        return cls(text, TowerConfig.read_vision(config, text), {IMAGE: token_id})
