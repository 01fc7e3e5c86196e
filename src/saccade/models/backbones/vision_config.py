"""The fields that all vision towers' configurations share. Does not import torch."""

from dataclasses import dataclass
from typing import Annotated

from saccade.errors import StartupError
from saccade.models.preprocessing.processor_config import CHANNELS


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A tower of *depth* blocks, read from transformers' keys. Patches have *patch_size* x *patch_size* pixels."""

    depth: Annotated[int, "num_hidden_layers"]
    hidden_size: Annotated[int, "hidden_size"]
    intermediate_size: Annotated[int, "intermediate_size"]
    num_heads: Annotated[int, "num_attention_heads"]
    patch_size: Annotated[int, "patch_size"]
    activation: str
    norm_eps: float

    @property
    def head_dim(self) -> int:
        """The number of channels in a head."""
        return self.hidden_size // self.num_heads

    @property
    def kernel(self) -> tuple[int, ...]:
        """Channels, height and width of a patch. Towers for videos add frames after the channels."""
        return CHANNELS, self.patch_size, self.patch_size


@dataclass(frozen=True, kw_only=True)
class MergingVisionConfig(VisionConfig):
    """A tower in which *merge_size* x *merge_size* patches become one token of width *out_hidden_size*."""

    merge_size: int
    out_hidden_size: int

    def check_rotation(self, heads: str) -> None:
        """Raise StartupError unless as many of a head's channel pairs can rotate by rows as by columns.

        *heads* is what the error calls the number of heads.
        """
        if self.hidden_size % (4 * self.num_heads):
            raise StartupError(f"config.json: the vision tower's width must be a multiple of 4 * {heads}.")
