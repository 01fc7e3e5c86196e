"""The spec for the engine's core, read from config.json. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from saccade.models.backbones.model_config import choice
from saccade.models.backbones.text_config import (
    HYBRID,
    HYBRID_EXPERTS,
    LLAMA,
    MINISTRAL,
    MISTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TIED,
    DecoderConfig,
    HybridConfig,
    TextConfig,
    TextStyle,
)
from saccade.models.backbones.windowed_config import STYLE, WindowedConfig
from saccade.models.spec import MAX_MODEL_LEN, ModelSpec

READERS: Mapping[str, tuple[type[DecoderConfig], TextStyle]] = MappingProxyType(
    {
        "llama": (TextConfig, LLAMA),
        "mistral": (TextConfig, MISTRAL),
        "qwen2": (TextConfig, QWEN2),
        "qwen3": (TextConfig, QWEN3),
        "qwen3_moe": (TextConfig, QWEN3_MOE),
        "ministral3": (TextConfig, MINISTRAL),
        "qwen3_5_text": (HybridConfig, HYBRID),
        "qwen3_5_moe_text": (HybridConfig, HYBRID_EXPERTS),
        "gemma3_text": (WindowedConfig, STYLE._replace(defaults={**STYLE.defaults, **TIED})),
    }
)
"""The form of config.json, and what its decoder differs in, by model_type."""


@dataclass(frozen=True)
class Spec(ModelSpec):
    """Implements models.spec.ModelSpec for a decoder without a tower."""

    text: DecoderConfig
    placeholder_of: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises a StartupError that names the key."""
        reader, style = READERS[choice(config, "model_type", tuple(READERS))]
        return cls(reader.read_decoder(config, style, config.get(MAX_MODEL_LEN)))
