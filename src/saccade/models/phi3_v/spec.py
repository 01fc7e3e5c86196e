"""The spec of Phi-3-vision for the engine's core, from its configuration. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from saccade.errors import InvalidValue, StartupError
from saccade.models.backbones.clip_config import LARGE_336, ClipConfig
from saccade.models.backbones.model_config import choice, integer, section
from saccade.models.backbones.text_config import PHI3, TextConfig
from saccade.models.phi3_v import FAMILY
from saccade.models.phi3_v.layout import CROP, PATCH, num_tokens
from saccade.models.spec import IMAGE, MAX_MODEL_LEN, Grid, ModelSpec, Size

CROP_PATCHES = CROP // PATCH


@dataclass(frozen=True)
class Spec(ModelSpec):
    """Implements models.spec.ModelSpec, and holds the network's checked settings from config.json.

    *num_blocks* is how many of the vision tower's blocks compute the features.
    """

    text: TextConfig
    vision: ClipConfig
    num_blocks: int
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json as models.files.engine_config returns it. Raises a StartupError that names the key."""
        text = TextConfig.read_decoder(config, PHI3, max_model_len=config.get(MAX_MODEL_LEN))
        embedding = section(config, "embd_layer")
        choice(embedding, "projection_cls", ("mlp",))
        choice(embedding, "hd_transform_order", ("sub_glb",))
        processor = {"type_feature": "patch", "layer_idx": -2, **section(config, "img_processor")}
        choice(processor, "type_feature", ("patch",))
        # The releases only name the tower; a checkpoint with another one describes it as CLIP's configurations do.
        described = section(config, "vision_config") if "vision_config" in config else {}
        vision = ClipConfig.read_vision({**LARGE_336, **described})
        if (vision.image_size, vision.patch_size) != (CROP, PATCH):
            raise StartupError(
                f"config.json: the vision tower must take images of {CROP} pixels in patches of {PATCH}, not "
                f"{vision.image_size} in patches of {vision.patch_size}."
            )
        if integer(processor, "image_dim_out") != vision.hidden_size:
            raise StartupError(
                f"config.json: `img_processor.image_dim_out` is {processor['image_dim_out']}, but the vision tower's "
                f"`hidden_size` is {vision.hidden_size}."
            )
        token_id = FAMILY.placeholder_below(config, text.vocab_size)
        num_blocks = vision.num_blocks(processor["layer_idx"])
        return cls(text, vision, num_blocks, {"image": token_id})

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the tokens of the crops and the global view. Raises InvalidValue unless the grid is whole crops."""
        return num_tokens(*crops(grid))

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, int, int]:
        """Return the shape of the padded image, (channels, height, width)."""
        return 3, grid[1] * PATCH, grid[2] * PATCH

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches in the crops and the global view."""
        return grid[1] * grid[2] + CROP_PATCHES**2

    @property
    def num_encoder_layers(self) -> int:
        return self.num_blocks

    def square_grid(self, max_patches: int) -> Grid:
        """Return a square of whole crops, which leaves room for the global view."""
        side = max(1, isqrt(max(0, max_patches // CROP_PATCHES**2 - 1))) * CROP_PATCHES
        return 1, side, side


def crops(grid: Grid) -> tuple[int, int]:
    """Return the numbers of rows and columns of crops. Raises InvalidValue unless the grid is whole crops."""
    frames, height, width = grid
    if frames != 1 or min(height, width) < 1 or height % CROP_PATCHES or width % CROP_PATCHES:
        raise InvalidValue(
            f"An image's grid must be one frame of rows and columns that are multiples of {CROP_PATCHES}, not "
            f"{tuple(grid)}."
        )
    return height // CROP_PATCHES, width // CROP_PATCHES
