"""The fields that all vision towers' configurations share. No torch."""

from dataclasses import dataclass
from typing import Annotated

from saccade.errors import StartupError
from saccade.models.preprocessing.processor_config import CHANNELS


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A tower of *depth* blocks, with the keys of transformers' configurations. Patches have *patch_size* pixels."""

    depth: Annotated[int, "num_hidden_layers"]
    hidden_size: Annotated[int, "hidden_size"]
    intermediate_size: Annotated[int, "intermediate_size"]
    num_heads: Annotated[int, "num_attention_heads"]
    patch_size: Annotated[int, "patch_size"]
    activation: str
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.hidden_size // self.num_heads

    @property
    def kernel(self) -> tuple[int, ...]:
        """Channels, height and width of a patch; videos have frames after the channels."""
        return CHANNELS, self.patch_size, self.patch_size


@dataclass(frozen=True, kw_only=True)
class MergingVisionConfig(VisionConfig):
    """A tower whose *merge_size* squared patches become one token of width *out_hidden_size*."""

    merge_size: int
    out_hidden_size: int

    def check_rotation(self, heads: str) -> None:
        """Raise StartupError unless pairs of a head's channels rotate by rows and as many by columns.

        *heads* is the configuration's key for the number of heads.
        """
        if self.hidden_size % (4 * self.num_heads):
            raise StartupError(f"config.json: the vision tower's width must be a multiple of 4 * {heads}.")
