"""The spec for the engine's core, from config.json. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from saccade.models.backbones.model_config import choice
from saccade.models.backbones.text_config import (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    DecoderConfig,
    TextConfig,
    TextStyle,
    text_section,
)
from saccade.models.spec import MAX_MODEL_LEN, ModelSpec

READERS: Mapping[str, tuple[type[DecoderConfig], TextStyle]] = MappingProxyType(
    {
        "llama": (TextConfig, LLAMA),
        "mistral": (TextConfig, MISTRAL),
        "qwen2": (TextConfig, QWEN2),
        "qwen3": (TextConfig, QWEN3),
    }
)
"""The form of config.json, and what its decoder differs in, by model_type."""


@dataclass(frozen=True)
class Spec(ModelSpec):
    """models.spec.ModelSpec of a decoder alone."""

    text: DecoderConfig
    placeholder_of: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Read config.json. Raises StartupError, naming the key."""
        reader, style = READERS[choice(config, "model_type", tuple(READERS))]
        return cls(reader.read(text_section(config), style, config.get(MAX_MODEL_LEN)))
