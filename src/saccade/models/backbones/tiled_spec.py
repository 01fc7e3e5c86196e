"""The spec of a model that sees an image as square tiles plus the whole image. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt

from saccade.errors import InvalidValue
from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.text_config import DecoderConfig
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.preprocessing.tiles import num_views
from saccade.models.spec import IMAGE, Grid, ModelSpec, Size


@dataclass(frozen=True)
class TiledSpec(ModelSpec):
    """Implements models.spec.ModelSpec. Each square of *scale* x *scale* patches becomes one token."""

    text: DecoderConfig
    vision: ClipConfig
    scale: int
    placeholder_of: Mapping[str, int]

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of tokens of all views. Raises InvalidValue for a grid that is not made of whole tiles."""
        return self.num_views(grid) * (self.vision.side // self.scale) ** 2

    def num_views(self, grid: Grid) -> int:
        """Return the number of square views. Raises InvalidValue for a grid that does not consist of whole tiles."""
        frames, rows, columns = grid
        side = self.vision.side
        if frames != 1 or min(rows, columns) < 1 or rows % side or columns % side:
            raise InvalidValue(
                f"An image's grid must be one frame of rows and columns that are multiples of {side}, not "
                f"{tuple(grid)}."
            )
        return num_views(rows // side, columns // side)

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return the shape of the views."""
        return self.num_views(grid), CHANNELS, self.vision.image_size, self.vision.image_size

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches in all views."""
        return self.num_views(grid) * self.vision.num_patches

    @property
    def num_encoder_layers(self) -> int:
        """The number of blocks in the tower."""
        return self.vision.depth

    def square_grid(self, max_patches: int) -> Grid:
        """Return the largest square of tiles that leaves room for the view of the whole image, but at least one."""
        side = max(1, isqrt(max(0, max_patches // self.vision.num_patches - 1))) * self.vision.side
        return 1, side, side
