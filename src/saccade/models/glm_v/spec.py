"""The specs for the engine's core, read from config.json. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from saccade.errors import StartupError
from saccade.models.backbones.deepseek_config import ExpertConfig
from saccade.models.backbones.grid_spec import GridSpec
from saccade.models.backbones.merging_config import MergingConfig
from saccade.models.backbones.model_config import flag, integer, part
from saccade.models.backbones.text_config import TextConfig, TextStyle, text_section
from saccade.models.glm_v import GLM4V, defaults
from saccade.models.spec import IMAGE, VIDEO

DENSE = TextStyle(defaults.TEXT, axes="chunked", mrope_section=(8, 12, 12), rotary_factor=1.0)
OCR = DENSE._replace(defaults=defaults.OCR_TEXT)
ROUTED = DENSE._replace(defaults=defaults.ROUTED_TEXT, rotary_factor=0.5)


@dataclass(frozen=True, kw_only=True)
class GlmTextConfig(TextConfig):
    """GLM-4's decoder. With *routed* experts, the first *num_dense_layers* layers have an MLP.

    Without them, neighbouring channels are rotated together, and the results of attention and MLP have norms.
    """

    routed: ExpertConfig | None
    num_dense_layers: int

    @classmethod
    def more(cls, text: Mapping[str, Any], style: TextStyle, max_model_len: int | None) -> dict[str, Any]:
        routed = ExpertConfig.read_experts(text) if "n_routed_experts" in text else None
        num_dense = integer(text, "first_k_dense_replace", least=0) if routed else integer(text, "num_hidden_layers")
        return {**super().more(text, style, max_model_len), "routed": routed, "num_dense_layers": num_dense}

    @classmethod
    def read_glm_decoder(cls, text: Mapping[str, Any], style: TextStyle) -> Self:
        """Read the decoder's keys *text*, for *style*. Raises a StartupError that names the key.

        With experts, `attention_bias` means a bias only for queries, keys and values.
        """
        if style.defaults is ROUTED.defaults:
            style = style._replace(qkv_bias=flag({**style.defaults, **text}, "attention_bias"))
        if text.get("use_qk_norm"):
            raise StartupError("config.json: `use_qk_norm` is true; this network's heads have no norms.")
        return cls.read_decoder({**text, "attention_bias": False}, style)


@dataclass(frozen=True, kw_only=True)
class TowerConfig(MergingConfig):
    """The tower of GLM-4.xV, with side * side learned positions, which are resampled to each grid."""

    defaults: ClassVar[Mapping[str, Any]] = defaults.TOWER

    image_size: Annotated[int, "image_size"]
    norm_eps: Annotated[float, "rms_norm_eps"]
    attention_bias: Annotated[bool, "attention_bias"]

    @property
    def side(self) -> int:
        """The number of learned positions along each side."""
        return self.image_size // self.patch_size


class OcrTowerConfig(TowerConfig):
    """The tower of GLM-OCR, which has biases unless config.json says otherwise."""

    defaults: ClassVar[Mapping[str, Any]] = defaults.OCR_TOWER


@dataclass(frozen=True)
class Spec(GridSpec):
    """Implements models.spec.ModelSpec for GLM-4.1V, 4.5V and 4.6V."""

    tower: ClassVar[type[TowerConfig]] = TowerConfig
    style: ClassVar[TextStyle] = DENSE._replace(qkv_bias=True)

    text: GlmTextConfig
    vision: TowerConfig
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        keys = text_section(config)
        text = GlmTextConfig.read_glm_decoder(keys, ROUTED if has_experts(config, keys) else cls.style)
        vision = cls.tower.read_vision(part(config, "vision_config"))
        if vision.out_hidden_size != text.hidden_size:
            raise StartupError("config.json: the vision tower's `out_hidden_size` must equal the text `hidden_size`.")
        token_id = GLM4V.placeholder_below(config, text.vocab_size)
        return cls(text, vision, {IMAGE: token_id, VIDEO: token_id})


class OcrSpec(Spec):
    """The spec of GLM-OCR."""

    tower, style = OcrTowerConfig, OCR


def has_experts(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Return whether config.json names a decoder with experts, or its section *text* describes one."""
    named = (config.get("architectures") or config.get("model_type"), text.get("model_type"))
    return "n_routed_experts" in text or "moe" in str(named).lower()
