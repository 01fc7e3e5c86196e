"""Reads and checks the config.json of vision towers that merge patches. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from saccade.errors import StartupError
from saccade.models.backbones.model_config import choice, integer, values_of
from saccade.models.backbones.vision_config import MergingVisionConfig
from saccade.models.preprocessing.processor_config import CHANNELS

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "silu")


@dataclass(frozen=True, kw_only=True)
class MergingConfig(MergingVisionConfig):
    """The settings that all these towers have. *defaults* holds the values of keys that config.json leaves out."""

    defaults: ClassVar[Mapping[str, Any]] = {}

    depth: Annotated[int, "depth"]
    num_heads: Annotated[int, "num_heads"]
    out_hidden_size: Annotated[int, "out_hidden_size"]
    merge_size: Annotated[int, "spatial_merge_size"]
    temporal_patch_size: Annotated[int, "temporal_patch_size"]
    norm_eps: float = 1e-6

    @classmethod
    def read_vision(cls, vision: Mapping[str, Any]) -> Self:
        """Read `vision_config`. Raises a StartupError that names the key."""
        vision = {**cls.defaults, **vision}
        activation = choice(vision, "hidden_act", ACTIVATIONS)
        config = cls(activation=activation, **values_of(cls, vision), **cls.more(vision))
        config.check_rotation("`num_heads`")
        if integer(vision, "in_channels") != CHANNELS:
            raise StartupError(f"config.json: `in_channels` must be {CHANNELS}, not {vision['in_channels']}.")
        return config

    @classmethod
    def more(cls, vision: Mapping[str, Any]) -> dict[str, Any]:
        """Return a subclass's fields that are not annotated with a key. Raises a StartupError that names the key."""
        return {}

    @property
    def kernel(self) -> tuple[int, ...]:
        """Channels, frames, height and width of a patch."""
        return CHANNELS, self.temporal_patch_size, self.patch_size, self.patch_size

    @property
    def num_features(self) -> int:
        """How many vectors of the text model's width each image token has."""
        return 1
