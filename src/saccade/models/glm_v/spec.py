"""The specs for the engine's core, from config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from saccade.errors import StartupError
from saccade.models.backbones.deepseek_config import ExpertConfig
from saccade.models.backbones.grid_spec import GridSpec
from saccade.models.backbones.merging_config import MergingConfig
from saccade.models.backbones.model_config import flag, integer, section
from saccade.models.backbones.text_config import COMMON, TextConfig, TextStyle, text_section
from saccade.models.glm_v import GLM4V
from saccade.models.spec import IMAGE, VIDEO

DENSE = TextStyle(
    MappingProxyType({**COMMON, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}),
    axes="chunked",
    mrope_section=(8, 12, 12),
    rotary_factor=1.0,
)
ROUTED = DENSE._replace(
    defaults=MappingProxyType(
        {
            **DENSE.defaults,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
        }
    ),
    rotary_factor=0.5,
)
"""Defaults that the releases' configuration classes have and their files may leave out: transformers 5.23."""


@dataclass(frozen=True, kw_only=True)
class GlmTextConfig(TextConfig):
    """GLM-4's decoder. With *routed* experts, the first *num_dense_layers* layers have an MLP.

    Without them, channels that are rotated together are neighbours, and the results of attention and MLP have norms.
    """

    routed: ExpertConfig | None
    num_dense_layers: int

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        routed = ExpertConfig.read(text) if "n_routed_experts" in text else None
        num_dense = integer(text, "first_k_dense_replace", least=0) if routed else integer(text, "num_hidden_layers")
        return {**super().more(text, style, max_model_len), "routed": routed, "num_dense_layers": num_dense}

    @classmethod
    def of(cls, text: Mapping[str, Any], *, qkv_bias: bool) -> Self:
        """Read the decoder's keys *text*. Raises StartupError, naming the key.

        `attention_bias` of a decoder with experts is a bias of queries, keys and values alone; others have *qkv_bias*.
        """
        style = ROUTED if "n_routed_experts" in text else DENSE
        if "n_routed_experts" in text:
            qkv_bias = flag({"attention_bias": True, **text}, "attention_bias")
        if text.get("use_qk_norm"):
            raise StartupError("config.json: `use_qk_norm` is true; this network's heads have no norms.")
        return cls.read({**text, "attention_bias": False}, style._replace(qkv_bias=qkv_bias))


@dataclass(frozen=True, kw_only=True)
class TowerConfig(MergingConfig):
    """The tower of GLM-4.xV: side * side learned positions, which are resampled to each grid."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "in_channels": 3,
        "image_size": 336,
        "rms_norm_eps": 1e-5,
        "temporal_patch_size": 2,
    }
    """transformers 5.23, Glm4vVisionConfig."""

    image_size: Annotated[int, "image_size"]
    norm_eps: Annotated[float, "rms_norm_eps"]
    attention_bias: Annotated[bool, "attention_bias"]

    @property
    def side(self) -> int:
        """Number of learned positions along each side."""
        return self.image_size // self.patch_size


class OcrTowerConfig(TowerConfig):
    """The tower of GLM-OCR, whose biases are there unless config.json says otherwise."""

    defaults: ClassVar[Mapping[str, Any]] = {**TowerConfig.defaults, "attention_bias": True}


@dataclass(frozen=True)
class Spec(GridSpec):
    """models.spec.ModelSpec of GLM-4.1V, 4.5V and 4.6V."""

    tower: ClassVar[type[TowerConfig]] = TowerConfig
    qkv_bias: ClassVar[bool] = True

    text: GlmTextConfig
    vision: TowerConfig
    placeholder_of: Mapping[str, int]

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises StartupError, naming the key."""
        text = GlmTextConfig.of(text_section(config), qkv_bias=cls.qkv_bias)
        vision = cls.tower.read(section(config, "vision_config"))
        if vision.out_hidden_size != text.hidden_size:
            raise StartupError("config.json: the vision tower's `out_hidden_size` must equal the text `hidden_size`.")
        token_id = GLM4V.placeholder_below(config, text.vocab_size)
        return cls(text, vision, {IMAGE: token_id, VIDEO: token_id})


class OcrSpec(Spec):
    """GLM-OCR."""

    tower, qkv_bias = OcrTowerConfig, False
