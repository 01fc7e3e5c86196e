"""The spec for the engine's core, read from config.json. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Self

from saccade.models.backbones import text_defaults
from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.grid_spec import GridSpec
from saccade.models.backbones.model_config import flag, part
from saccade.models.backbones.text_config import TIED, TextConfig, TextStyle, text_section
from saccade.models.backbones.vision_config import MergingVisionConfig
from saccade.models.paddleocr_vl import FAMILY
from saccade.models.spec import IMAGE

ERNIE = TextStyle(
    MappingProxyType(
        {
            **text_defaults.COMMON,
            "vocab_size": 103424,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 18,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
        }
    ),
    axes="chunked",
    mrope_section=(16, 24, 24),
)
"""ERNIE 4.5's decoder, with positions on three axes; defaults of transformers' PaddleOCRTextConfig."""

SILENT_VISION: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "spatial_merge_size": 2,
    }
)
"""The defaults of transformers' PaddleOCRVisionConfig."""


@dataclass(frozen=True, kw_only=True)
class TowerConfig(ClipConfig, MergingVisionConfig):
    """SigLIP's tower for images of any size."""

    merge_size: Annotated[int, "spatial_merge_size"]
    out_hidden_size: Annotated[int, "out_hidden_size"]


@dataclass(frozen=True)
class Spec(GridSpec):
    """Implements models.spec.ModelSpec for PaddleOCR-VL."""

    text: TextConfig
    vision: TowerConfig
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        keys = text_section({**TIED, **config})
        biases = dict.fromkeys(("attention_bias", "mlp_bias"), flag(keys, "use_bias"))
        text = TextConfig.read_decoder({**keys, **biases}, ERNIE)
        vision = TowerConfig.read_vision(
            {**SILENT_VISION, **part(config, "vision_config"), "out_hidden_size": text.hidden_size}
        )
        vision.check_rotation("`num_attention_heads`")
        return cls(text, vision, {IMAGE: FAMILY.placeholder_below(config, text.vocab_size)})
