"""The specs for the engine's core, read from config.json. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from saccade.errors import StartupError
from saccade.models.backbones.grid_spec import GridSpec, placeholders
from saccade.models.backbones.merging_config import MergingConfig
from saccade.models.backbones.model_config import check_equal, part
from saccade.models.backbones.text_config import (
    HYBRID,
    HYBRID_EXPERTS,
    NORMALISED,
    HybridConfig,
    TextConfig,
    TextStyle,
    text_section,
)
from saccade.models.qwen_vl import defaults
from saccade.models.qwen_vl.tower_config import FlatTowerConfig, Tower2Config, Tower3Config, WindowedConfig
from saccade.models.spec import DRAFTS, VIDEO
from saccade.protocol.media import MediaItem

BIASED = TextStyle(defaults.TEXT2, qkv_bias=True, axes="chunked", mrope_section=(16, 24, 24), rotary_factor=1.0)
NORMED = TextStyle(defaults.TEXT3, normed_heads=True, axes="interleaved", mrope_section=(24, 20, 20), rotary_factor=1.0)
NORMED_EXPERTS = NORMED._replace(defaults=defaults.TEXT3_EXPERTS, fixed=NORMALISED)
PARTIAL, PARTIAL_EXPERTS = (
    style._replace(axes="interleaved", mrope_section=(11, 11, 10)) for style in (HYBRID, HYBRID_EXPERTS)
)
NUM_DRAFT_LAYERS = "mtp_num_hidden_layers"


def has_experts(config: Mapping[str, Any]) -> bool:
    """Return whether config.json's architecture, or else its model_type, names a network with experts."""
    return "moe" in str(config.get("architectures") or config.get("model_type")).lower()


@dataclass(frozen=True)
class QwenSpec(GridSpec):
    """Implements models.spec.ModelSpec for Qwen's families."""

    text_config: ClassVar[type[TextConfig]] = TextConfig
    style: ClassVar[TextStyle]
    style_with_experts: ClassVar[TextStyle]
    tower: ClassVar[type[MergingConfig]]

    text: TextConfig
    vision: MergingConfig
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        style = cls.style_with_experts if has_experts(config) else cls.style
        text = cls.text_config.read_decoder(text_section(config), style)
        vision = cls.tower.read_vision(part(config, "vision_config"))
        if vision.out_hidden_size != text.hidden_size:
            raise StartupError("config.json: the vision tower's `out_hidden_size` must equal the text `hidden_size`.")
        if vision.num_features > 1 + text.num_layers:
            raise StartupError("config.json: more `deepstack_visual_indexes` than text layers.")
        return cls(text, vision, placeholders(config, text.vocab_size))

    @property
    def feature_width(self) -> int:
        """The number of values in a token's features: one vector from the last block, one from each deepstack block."""
        return self.vision.out_hidden_size * self.vision.num_features


class Spec2(QwenSpec):
    """The spec of Qwen2-VL."""

    style, style_with_experts, tower, divides_videos = BIASED, BIASED, Tower2Config, False


class WindowedSpec(QwenSpec):
    """The spec of Qwen2.5-VL."""

    vision: WindowedConfig

    style, style_with_experts, tower, divides_videos = BIASED, BIASED, WindowedConfig, False

    def time_step(self, item: MediaItem) -> float:
        """Return the distance between the positions of a video's successive frame groups.

        A group lasts one second if *item* does not say.
        """
        seconds = 1.0 if item.seconds_per_group is None else item.seconds_per_group
        return float(np.float32(self.vision.tokens_per_second) * np.float32(seconds)) if item.modality == VIDEO else 1.0


class Spec3(QwenSpec):
    """The spec of Qwen3-VL, dense or with experts."""

    style, style_with_experts, tower = NORMED, NORMED_EXPERTS, Tower3Config


class HybridSpec(QwenSpec):
    """The spec of Qwen3.5, dense or with experts."""

    text: HybridConfig

    style, style_with_experts, tower, text_config = PARTIAL, PARTIAL_EXPERTS, FlatTowerConfig, HybridConfig

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        spec = super().read_config(config)
        if not config.get(DRAFTS):
            return spec
        text = {**HYBRID.defaults, **text_section(config)}
        if (count := text[NUM_DRAFT_LAYERS]) != 1:
            raise StartupError(
                "--speculative-config: the method mtp needs a release with one draft layer, but "
                f"`{NUM_DRAFT_LAYERS}` of its config.json is {count!r}. Use the method ngram."
            )
        check_equal(text, {"mtp_use_dedicated_embeddings": False})
        return replace(spec, text=replace(spec.text, drafts=True))

    @property
    def drafts(self) -> bool:
        """Whether the network includes the release's draft layer."""
        return self.text.drafts
