"""The spec of LLaVA-1.5 and LLaVA-NeXT for the engine's core, from their configuration. Does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from types import MappingProxyType
from typing import Any

from saccade.errors import InvalidValue
from saccade.models.backbones.clip_config import ClipConfig
from saccade.models.backbones.model_config import choice, section
from saccade.models.backbones.text_config import LLAMA, MISTRAL, TextConfig, TextStyle
from saccade.models.llava import FAMILY, tiles
from saccade.models.llava.settings import has_class_token, has_tiles, tower
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import IMAGE, Grid, ModelSpec, Size

STYLES: Mapping[str, TextStyle] = MappingProxyType({"llama": LLAMA, "mistral": MISTRAL})
"""By the model_type of a text_config."""

DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "image_token_index": 32000,
        "vision_feature_layer": -2,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
    }
)
"""The defaults of config.json: transformers, LlavaConfig and LlavaNextConfig."""


@dataclass(frozen=True)
class Spec(ModelSpec):
    """Implements models.spec.ModelSpec, and holds the network's checked settings from config.json.

    The features of an image are those after block *num_vision_blocks* of the vision tower. *has_tiles* is true for
    LLaVA-NeXT. With *has_class_token*, a view's features begin with the class token's.
    """

    text: TextConfig
    vision: ClipConfig
    num_vision_blocks: int
    projector_activation: str
    has_projector_bias: bool
    has_tiles: bool
    has_class_token: bool
    placeholder_of: Mapping[str, int]

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises a StartupError that names the key."""
        text, vision = _text(config), tower(config)
        stated = {**DEFAULTS, **{key: config[key] for key in DEFAULTS if config.get(key) is not None}}
        image_token_id = FAMILY.placeholder_below(config, text.vocab_size, DEFAULTS["image_token_index"])
        return cls(
            text=text,
            vision=vision,
            num_vision_blocks=vision.num_blocks(stated["vision_feature_layer"]),
            projector_activation=choice(stated, "projector_hidden_act", ("gelu", "gelu_pytorch_tanh", "silu")),
            has_projector_bias=bool(stated["multimodal_projector_bias"]),
            has_tiles=has_tiles(config),
            has_class_token=has_class_token(config),
            placeholder_of={"image": image_token_id},
        )

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of tokens of a square view, or of the base view and the tiles without their padding.

        Raises InvalidValue for a grid that does not consist of whole views, or for an impossible size.
        """
        self.num_views(grid)
        num_base_tokens = self.vision.num_patches + self.has_class_token
        return num_base_tokens + (tiles.num_features(self.unpadded_size(grid, original_size)) if self.has_tiles else 0)

    def num_views(self, grid: Grid) -> int:
        """Return the number of square views: one, or the base view and the tiles. Raises InvalidValue."""
        frames, rows, columns = grid
        side = self.vision.side
        if self.has_tiles and frames == 1 and min(rows, columns) > 0 and not (rows % side or columns % side):
            # The original size may drop almost all features, so the tokens do not limit the tiles that are encoded.
            if rows * columns > self.max_position_embeddings:
                raise InvalidValue(
                    f"An image's tiles must have at most {self.max_position_embeddings} features, as many as the "
                    f"model has positions, not {rows} x {columns}."
                )
            return 1 + rows * columns // self.vision.num_patches
        if not self.has_tiles and tuple(grid) == (1, side, side):
            return 1
        shape = f"rows and columns that are multiples of {side}" if self.has_tiles else f"{side} rows and columns"
        raise InvalidValue(f"An image's grid must be one frame of {shape}, not {tuple(grid)}.")

    def unpadded_size(self, grid: Grid, original_size: Size | None) -> tuple[int, int]:
        """Return how many (rows, columns) of the tiles' features are not padding: all, if *original_size* is None."""
        _, rows, columns = grid
        if original_size is None:
            return rows, columns
        height, width = original_size
        if min(height, width) < 1:
            raise InvalidValue(f"An image's original size must be at least 1 x 1, not {height} x {width}.")
        return tiles.unpadded(height, width, rows, columns)

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return the shape of the square view, or of the base view and the tiles."""
        view = (CHANNELS, self.vision.image_size, self.vision.image_size)
        return (self.num_views(grid), *view) if self.has_tiles else view

    def encode_cost(self, grid: Grid) -> int:
        return self.num_views(grid) * self.vision.num_patches

    @property
    def num_encoder_layers(self) -> int:
        return self.num_vision_blocks

    def square_grid(self, max_patches: int) -> Grid:
        """Return the square view, or a square of tiles that leaves room for the base view."""
        most_features = min(max_patches - self.vision.num_patches, self.max_position_embeddings)
        num_tiles = most_features // self.vision.num_patches if self.has_tiles else 1
        side = isqrt(max(1, num_tiles)) * self.vision.side
        return 1, side, side


def _text(config: Mapping[str, Any]) -> TextConfig:
    """Read the decoder's configuration. The releases leave out most keys whose values are its model_type's defaults."""
    text = {} if config.get("text_config") is None else section(config, "text_config")
    kind = choice({"model_type": "llama", **text}, "model_type", tuple(STYLES))
    tied = bool(config.get("tie_word_embeddings", False) or text.get("tie_word_embeddings", False))
    return TextConfig.read_decoder({**text, "tie_word_embeddings": tied}, STYLES[kind])
