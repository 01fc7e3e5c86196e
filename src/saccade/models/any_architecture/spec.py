"""The spec of any architecture for the engine's core, from transformers' reading of config.json.

Does not import torch. transformers loads only its configuration class.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from saccade.errors import InvalidValue, StartupError
from saccade.models.any_architecture import FAMILY
from saccade.models.any_architecture.configuration import read_configuration
from saccade.models.spec import IMAGE, Grid, KvSpec, ModelSpec, Paged, Size

PATCH_BYTES = 3 * 14 * 14 * 4
"""The bytes that count as one patch: an image's tensors may also hold other values than patches."""

KINDS = {"full_attention", "sliding_attention"}
"""The kinds of layers that are served."""


@dataclass(frozen=True)
class Text:
    """Implements models.spec.TextHalf."""

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    kv_specs: tuple[KvSpec, ...]
    rope: None = None


@dataclass(frozen=True)
class Spec(ModelSpec):
    """Implements models.spec.ModelSpec. An image's grid is (1, its tokens, the bytes of its tensors).

    If the tokens of a run of placeholders see each other, each run has *whole_run* tokens, which the loaded network
    finds out; else it is 0.
    """

    text: Text
    placeholder_of: Mapping[str, int]
    whole_run: int = 0

    @classmethod
    def read_config(cls, config: Mapping[str, Any]) -> "Spec":
        """Read config.json. Raises a StartupError that names what is missing."""
        configuration = read_configuration(config)
        text = configuration.get_text_config()
        own = Text(text.vocab_size, text.hidden_size, text.max_position_embeddings, tuple(_kv_specs(text)))
        token_id = FAMILY.placeholder_below(config, own.vocab_size, getattr(configuration, "image_token_id", None))
        return cls(own, {IMAGE: token_id})

    @property
    def longest_whole(self) -> int:
        """The length of a run whose tokens see each other."""
        return self.whole_run

    def span_lengths(self, grid: Grid, modality: str) -> tuple[int, ...] | None:
        """Return the lengths of an image's runs if their tokens see each other."""
        return (self.whole_run,) * (grid[1] // self.whole_run) if self.whole_run else None

    def item_tokens(self, grid: Grid, original_size: Size | None = None) -> int:
        """Return the number of placeholders. Raises InvalidValue for an empty image, or one without whole runs."""
        if min(grid) < 1 or grid[1] % max(1, self.whole_run):
            raise InvalidValue(
                f"An image has at least one byte and {self.whole_run or 1} tokens, or a multiple, not {tuple(grid)}."
            )
        return grid[1]

    def pixel_shape(self, grid: Grid, modality: str = IMAGE) -> tuple[int, ...]:
        """Return the number of bytes."""
        return (grid[2],)

    def encode_cost(self, grid: Grid) -> int:
        """Return the number of patches that have as many bytes."""
        return -(-grid[2] // PATCH_BYTES)

    @property
    def num_encoder_layers(self) -> int:
        """One: the tower does not pause."""
        return 1

    def square_grid(self, max_patches: int) -> Grid:
        """Return the grid of an image with *max_patches*, whose four patches become a token, or of one whole run."""
        return 1, self.whole_run or max(1, max_patches // 4), max(1, max_patches) * PATCH_BYTES

    @property
    def rope_factors(self) -> str:
        """Nothing: rotations whose factors depend on a setting are refused."""
        return ""


def _kv_specs(text: Any) -> list[KvSpec]:
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    if unknown := sorted(set(kinds) - KINDS):
        raise StartupError(f"config.json: layers of the kind {', '.join(unknown)} are not served for any architecture.")
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    windows = {"full_attention": None, "sliding_attention": getattr(text, "sliding_window", None)}
    return [Paged(heads, width, width, windows[kind]) for kind in kinds]
