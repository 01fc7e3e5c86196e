"""Maps squares of patches to features in the text network's space, for the model without a tower.

Formulas: transformers 5.23, modeling_gemma4_unified.py (Gemma4UnifiedVisionEmbedder). Shapes: P patches in merged
blocks, C channels * height * width of a patch, U tokens, V values of a token, W width of an embedded token, E text
width.
"""

from collections.abc import Sequence

import torch
from torch import nn

from saccade.models.gemma4.spec import UnifiedVision
from saccade.models.gemma4.text import normed
from saccade.models.gemma4.tower import table_places
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.models.spec import Grid
from saccade.nn.context import VisionAttentionBackend
from saccade.nn.layers import LayerNorm, Linear
from saccade.nn.layerwise import Layerwise
from saccade.nn.parallel import Ranks

NORM_EPS = 1e-5


class UnifiedEmbedder(nn.Module):
    """Norms and one matrix, plus learned positions for columns and rows, then a projection to the text's width."""

    def __init__(self, config: UnifiedVision, _: Ranks) -> None:
        super().__init__()
        self.config = config
        values = CHANNELS * (config.patch_size * config.merge_size) ** 2
        self.patch_ln1 = LayerNorm(values, NORM_EPS)
        self.patch_dense = Linear(values, config.width)
        self.patch_dense.is_as_stored = False
        self.patch_ln2 = LayerNorm(config.width, NORM_EPS)
        self.pos_embedding = nn.Parameter(torch.empty(config.table_size, 2, config.width), requires_grad=False)
        self.pos_norm = LayerNorm(config.width, NORM_EPS)
        self.embedding_projection = Linear(config.width, config.out_hidden_size, bias=False)

    def finish(self) -> None:
        """Put the loaded weights of a token's values into the wire's order: patch by patch, channel by channel."""
        self.patch_dense.make_plain()
        merge, patch = self.config.merge_size, self.config.patch_size
        for parameter in (self.patch_ln1.weight, self.patch_ln1.bias, self.patch_dense.weight):
            pixels = parameter.data.unflatten(-1, (merge, patch, merge, patch, CHANNELS))
            parameter.data = pixels.movedim((-5, -3, -1, -4, -2), (-5, -4, -3, -2, -1)).flatten(-5)

    def prepare(self, grids: Sequence[Grid], _: VisionAttentionBackend) -> torch.Tensor:
        """Return the column and row, int64 [U, 2], of each token of concatenated images, without a device sync."""
        merge = self.config.merge_size
        tokens = [(frames, rows // merge, columns // merge) for frames, rows, columns in grids]
        return table_places(tokens, 1, self.config.table_size, self.pos_embedding.device)

    def forward(self, patches_PC: torch.Tensor, places_U2: torch.Tensor) -> Layerwise:
        """Map patches with values from 0 to 1 to features [U, E]."""
        values_UV = patches_PC.reshape(len(places_U2), -1)
        x_UW = self.patch_ln2(self.patch_dense(self.patch_ln1(values_UV)))
        yield
        columns, rows = self.pos_embedding.unbind(1)
        positions_UW = columns.index_select(0, places_U2[:, 0]) + rows.index_select(0, places_U2[:, 1])
        x_UW = self.pos_norm(x_UW + positions_UW)
        return self.embedding_projection(normed(x_UW, self.config.norm_eps))  # type: ignore[no-any-return]
