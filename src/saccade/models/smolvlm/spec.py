"""The spec of Idefics3 and SmolVLM for the engine's core, from their configuration. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.models.backbones.model_config import choice, section
from saccade.models.backbones.text_config import LLAMA, TextConfig
from saccade.models.backbones.tiled_spec import TiledSpec
from saccade.models.smolvlm import FAMILY
from saccade.models.smolvlm.settings import scale, tower

DEFAULT_IMAGE_TOKEN_ID = 128257


@dataclass(frozen=True)
class Spec(TiledSpec):
    """Implements models.spec.ModelSpec, and holds the network's checked settings from config.json."""

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises a StartupError that names the key."""
        text, vision = _text(config), tower(config)
        token_id = FAMILY.placeholder_below(config, text.vocab_size, DEFAULT_IMAGE_TOKEN_ID)
        return cls(text, vision, scale(config, vision), {"image": token_id})


def _text(config: Mapping[str, Any]) -> TextConfig:
    """Read the decoder's configuration. The top level decides whether the head is tied.

    Without a `text_config`, the norms' epsilon is 1e-5.
    """
    text = {"rms_norm_eps": 1e-5} if config.get("text_config") is None else section(config, "text_config")
    choice({"model_type": "llama", **text}, "model_type", ("llama",))
    tied = bool(config.get("tie_word_embeddings", False))
    return TextConfig.read_decoder({**text, "tie_word_embeddings": tied}, LLAMA)
