"""Reads and checks the configuration of CLIP's vision tower, for networks and specs. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Self

from saccade.errors import StartupError
from saccade.models.backbones.model_config import choice, values_of
from saccade.models.backbones.vision_config import VisionConfig
from saccade.models.preprocessing.processor_config import CHANNELS

SILENT: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": CHANNELS,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    }
)
"""The defaults of missing keys: transformers, CLIPVisionConfig."""

LARGE_336: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
    }
)
"""The configuration of openai/clip-vit-large-patch14-336, which some checkpoints only name."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig(VisionConfig):
    """The configuration of a tower for square images, *image_size* pixels on each side."""

    image_size: Annotated[int, "image_size"]
    norm_eps: Annotated[float, "layer_norm_eps"]

    @classmethod
    def read_vision(cls, vision: Mapping[str, Any]) -> Self:
        """Read a `vision_config`. Raises a StartupError that names the key."""
        vision = {**SILENT, **vision}
        activation = choice(vision, "hidden_act", ("quick_gelu", "gelu", "gelu_pytorch_tanh"))
        config = cls(activation=activation, **values_of(cls, vision))
        if config.hidden_size % config.num_heads:
            raise StartupError(
                "config.json: the vision tower's `hidden_size` must be a multiple of `num_attention_heads`."
            )
        if config.patch_size > config.image_size:
            raise StartupError("config.json: the vision tower's `patch_size` must not exceed its `image_size`.")
        if vision["num_channels"] != CHANNELS:
            raise StartupError(
                f"config.json: the vision tower's `num_channels` must be {CHANNELS}, not {vision['num_channels']!r}."
            )
        return config

    @property
    def side(self) -> int:
        """The number of patches along each side of an image."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """The number of patches in an image."""
        return self.side**2

    def num_blocks(self, feature_layer: object) -> int:
        """Return how many blocks produce hidden_states[feature_layer]; entry 0 is the first block's input.

        Raises StartupError unless *feature_layer* is the index of one of the depth + 1 hidden states.
        """
        if type(feature_layer) is not int or not -self.depth - 1 <= feature_layer <= self.depth:
            raise StartupError(
                f"config.json: the vision feature layer must be a whole number from {-self.depth - 1} to {self.depth}, "
                f"one of the {self.depth + 1} hidden states of the vision tower, not {feature_layer!r}."
            )
        return feature_layer % (self.depth + 1)
