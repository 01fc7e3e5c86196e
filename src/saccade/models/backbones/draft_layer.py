"""A hybrid decoder's draft layer, which predicts the token after the next one.

Formulas: vLLM, qwen3_5_mtp.py (Qwen3_5MultiTokenPredictor); the idea comes from DeepSeek-V3, arXiv:2412.19437, section
2.2. In the releases, the layer shares the decoder's embedding table and head. Shapes: N tokens, E hidden size.
"""

from typing import Any

import torch
from torch import nn

from saccade.models.backbones.decoder import DecoderLayer
from saccade.models.backbones.grouped_query_text import mlp_of
from saccade.models.backbones.hybrid_text import GatedAttention, SharedExpertMixture
from saccade.models.backbones.text_config import HybridConfig
from saccade.nn.context import ForwardContext
from saccade.nn.layers import Linear, OffsetNorm
from saccade.nn.parallel import Ranks


class DraftLayer(nn.Module):
    """Joins a token's embedding and the previous token's hidden state, then applies a layer that attends to all tokens.

    The hidden state is the decoder's result after its last norm.
    """

    def __init__(self, config: HybridConfig, ranks: Ranks) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.pre_fc_norm_embedding = OffsetNorm(size, eps)
        self.pre_fc_norm_hidden = OffsetNorm(size, eps)
        self.fc = Linear(2 * size, size, bias=False)
        attention = GatedAttention(config, config.num_layers, ranks.attention)
        mlp = mlp_of(config, config.num_layers - 1, ranks, SharedExpertMixture)
        self.layers = nn.ModuleList([DecoderLayer(config, attention, mlp, OffsetNorm)])
        self.norm = OffsetNorm(size, eps)

    def forward(
        self, x_NE: torch.Tensor, hidden_NE: torch.Tensor, rotation: Any, context: ForwardContext, *, attends: bool
    ) -> torch.Tensor:
        """Return the states [N, E] after the layer's norm.

        Without *attends*, only write keys and values, and return *hidden_NE*.
        """
        joined_NE = self.fc(torch.cat((self.pre_fc_norm_embedding(x_NE), self.pre_fc_norm_hidden(hidden_NE)), -1))
        [layer] = self.layers
        if attends:
            return self.norm(layer(joined_NE, rotation, context))  # type: ignore[no-any-return]
        layer.self_attn.cached_heads(layer.input_layernorm(joined_NE), rotation, context)  # type: ignore[union-attr,operator]
        return hidden_NE
