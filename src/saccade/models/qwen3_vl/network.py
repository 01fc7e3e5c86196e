"""Vision tower, projector and text decoder.

Shapes: N tokens, P patches, C values of a patch, E hidden size, R rows to predict from, V vocabulary, U tokens of
pictures in the step, W = E * (1 + number of deepstack features).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from saccade.errors import InvalidValue, StartupError
from saccade.models.backbones.configuration import integer, section
from saccade.models.backbones.qwen_text import TextConfig, TextDecoder
from saccade.models.backbones.qwen_vision import EncoderMetadata, VisionConfig, VisionTower
from saccade.models.preprocessing.configuration import CHANNELS
from saccade.models.qwen3_vl.layout import Layout
from saccade.models.qwen3_vl.weights import Target, locate
from saccade.nn.context import Backend, ForwardContext, KvSpec
from saccade.nn.linear import Linear
from saccade.nn.rope import MultimodalPositions
from saccade.nn.vision import Grid, grid_list

EXPERT_KEYS = ("num_experts", "num_local_experts", "moe_intermediate_size")


def _check_dense(text: Mapping[str, Any]) -> None:
    found = next((key for key in EXPERT_KEYS if text.get(key)), None)
    if found is not None:
        raise StartupError(
            f"config.json: `text_config.{found}` says that the model has experts; Saccade's engine runs only the dense "
            "kind yet. A gateway serves it over workers of other makes."
        )


class Network(nn.Module):
    """The engine's half of the family. Parameters are empty until the loader has filled them and called `finish`."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        super().__init__()
        _check_dense(section(config, "text_config"))
        text = TextConfig.read(section(config, "text_config"))
        vision = VisionConfig.read(section(config, "vision_config"))
        if vision.out_hidden_size != text.hidden_size:
            raise StartupError("config.json: the vision tower's `out_hidden_size` must equal the text `hidden_size`.")
        if len(vision.deepstack_layers) > text.num_layers:
            raise StartupError("config.json: more `deepstack_visual_indexes` than text layers.")
        tied = section(config, "text_config").get("tie_word_embeddings", False)
        self.tied = bool(config.get("tie_word_embeddings", tied))
        self.kv_spec = KvSpec(text.num_layers, text.num_kv_heads, text.head_dim)
        self.vocab_size = text.vocab_size
        self.max_position_embeddings = text.max_position_embeddings
        self.placeholder_of = {"image": integer(config, "image_token_id", least=0)}
        self.placeholder_token_ids = (*self.placeholder_of.values(), integer(config, "video_token_id", least=0))
        if max(self.placeholder_token_ids) >= text.vocab_size:
            raise StartupError("config.json: `image_token_id` and `video_token_id` must be below `vocab_size`.")
        self.merge_size = vision.merge_size
        self.patch_values = vision.patch_values
        self.visual = VisionTower(vision)
        self.language_model = TextDecoder(text)
        self.lm_head = None if self.tied else Linear(text.hidden_size, text.vocab_size, bias=False)
        if vision.channels != CHANNELS:
            raise StartupError(f"config.json: `in_channels` must be {CHANNELS}, not {vision.channels}.")
        settings = Layout(config, preprocessor).settings
        self.mean_std = [settings["image_mean"], settings["image_std"]]
        self.scaled_mean_std = torch.empty(0)

    def locate(self, name: str) -> Target | None:
        """Return the parameter that the checkpoint's tensor *name* fills; None where it is not needed."""
        return locate(name, self.tied)

    def finish(self) -> None:
        """Make what is derived from loaded weights and their device. Call once, behind loading."""
        self.visual.finish()
        self.language_model.finish()
        device = self.language_model.embedding_VE.device
        self.scaled_mean_std = torch.tensor(self.mean_std, dtype=torch.float32, device=device) * 255

    def item_tokens(self, grid: Grid) -> int:
        """Return how many placeholder tokens a picture of *grid* patches takes. Raises InvalidValue."""
        frames, height, width = grid
        if frames != 1 or min(height, width) < 1 or height % self.merge_size or width % self.merge_size:
            raise InvalidValue(
                f"A picture's grid must be one frame of rows and columns that are multiples of {self.merge_size}, "
                f"not {tuple(grid)}."
            )
        return height * width // self.merge_size**2

    def pixel_shape(self, grid: Grid) -> tuple[int, int]:
        """Return the shape of a picture's uint8 patches on the wire."""
        return grid[0] * grid[1] * grid[2], self.patch_values

    def positions(self, spans: Sequence[tuple[int, Grid]]) -> MultimodalPositions:
        """Return the positions of a sequence whose pictures start at spans[i][0] and have grids spans[i][1]."""
        merge = self.merge_size
        return MultimodalPositions([(start, (t, h // merge, w // merge)) for start, (t, h, w) in spans])

    def prepare(
        self, grids: torch.Tensor | Sequence[Sequence[int]], backend: Backend
    ) -> tuple[EncoderMetadata, list[int]]:
        """Return what encoding needs to know of *grids* (on the CPU), and each picture's token count."""
        host = grid_list(grids)
        return self.visual.prepare(host, backend), [self.item_tokens(grid) for grid in host]

    def encode(self, pixels_PC: torch.Tensor, metadata: EncoderMetadata) -> torch.Tensor:
        """Map uint8 patches [P, C] to features [U, W], pictures one after the other."""
        backend, dtype = metadata.backend, self.language_model.embedding_VE.dtype
        mean, std = self.scaled_mean_std
        # In this order and precision it is bit-equal to the reference processor, which folds 1/255 into mean and std.
        patches = backend.normalise(pixels_PC, mean, std, dtype)
        return self.visual.merge(*self.visual.forward_blocks(patches, metadata), backend)

    def forward(
        self,
        input_ids: torch.Tensor,
        context: ForwardContext,
        media_rows: torch.Tensor | None = None,
        media_UW: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states [N, E] for ids int64 [N]; media_UW stands in for the ids at *media_rows* int64 [U]."""
        x_NE = self.language_model.embed(input_ids)
        if media_rows is None or media_UW is None:
            return self.language_model(x_NE, context)  # type: ignore[no-any-return]
        main, *deep = media_UW.chunk(media_UW.shape[1] // x_NE.shape[1], dim=1)
        x_NE.index_copy_(0, media_rows, main)
        return self.language_model(x_NE, context, media_rows, deep)  # type: ignore[no-any-return]

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in float32."""
        if self.lm_head is None:
            return functional.linear(hidden_RE, self.language_model.embedding_VE).float()
        return self.lm_head(hidden_RE).float()  # type: ignore[no-any-return]
