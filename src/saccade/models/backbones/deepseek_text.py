"""DeepSeek-V3's decoder: attention over latents, then an MLP or a mixture of experts.

All of a token's keys and values derive from one latent. Only the latent and one rotated key, which the heads share, are
cached. The key matrix is applied to the queries rather than the latents, and the value matrix to the attended latents
(DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Formulas: transformers, modeling_deepseek_v3.py. Shapes: N tokens, E
hidden size, Q query heads, K plain width of a query, R rotated width, W latent width, C = W + R, V value width of a
head.
"""

import torch
from torch import nn

from saccade.models.backbones.decoder import DecoderLayer, GatedMlp, TextDecoder
from saccade.models.backbones.deepseek_config import DeepseekTextConfig, ExpertConfig
from saccade.models.backbones.text_config import DecoderConfig
from saccade.nn.context import ForwardContext
from saccade.nn.experts import Experts
from saccade.nn.layers import Layer, Linear, RMSNorm
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin_pairs

LATENT_NORM_EPS = 1e-6
"""The norms of latents do not use config.json's value, in transformers and in the release."""


class Queries(Layer):
    """Computes the queries of this rank's heads, [N, Q * (K + R)], through a latent if the configuration has one."""

    def __init__(self, config: DeepseekTextConfig, ranks: Ranks) -> None:
        super().__init__()
        num_heads, latent_width = config.num_heads, config.query_latent_width
        width = num_heads * (config.plain_width + config.rope_width)
        self.q_a_proj = self.q_a_layernorm = None
        if latent_width is not None:
            self.q_a_proj = Linear(config.hidden_size, latent_width, config.attention_bias)
            self.q_a_layernorm = RMSNorm(latent_width, LATENT_NORM_EPS)
        inputs = latent_width or config.hidden_size
        self.q_proj = Linear(inputs, width, bias=False, split="outputs", units=(num_heads,), ranks=ranks)

    def forward(self, x_NE: torch.Tensor) -> torch.Tensor:
        """Map [N, E] to [N, Q * (K + R)]."""
        if self.q_a_proj is not None and self.q_a_layernorm is not None:
            x_NE = self.q_a_layernorm(self.q_a_proj(x_NE))
        return self.q_proj(x_NE)  # type: ignore[no-any-return]


class LatentAttention(Layer):
    """Causal attention with absorbed queries over cached latents.

    The heads are divided among the ranks, but every rank has all latents.
    """

    def __init__(self, config: DeepseekTextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        num_heads, bias = config.num_heads, config.attention_bias
        self.config, self.layer, self.num_heads = config, layer, ranks.divide(num_heads)
        self.queries = Queries(config, ranks)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.latent_width + config.rope_width, bias)
        self.kv_a_layernorm = RMSNorm(config.latent_width, LATENT_NORM_EPS)
        width = num_heads * (config.plain_width + config.value_width)
        self.kv_b_proj: Linear | None = Linear(
            config.latent_width, width, bias=False, split="outputs", units=(num_heads,), ranks=ranks
        )
        self.kv_b_proj.is_as_stored = False
        outputs = num_heads * config.value_width
        self.o_proj = Linear(outputs, config.hidden_size, bias, split="inputs", ranks=ranks)
        self.to_keys_QKW = self.to_values_QWV = torch.empty(0)

    def finish(self) -> None:
        """Split the loaded kv_b_proj into a key matrix and a value matrix, in the network's dtype."""
        if self.kv_b_proj is None:
            return
        parts = self.kv_b_proj.dequantised().data.unflatten(0, (self.num_heads, -1))
        self.to_keys_QKW, values_QVW = parts.split((self.config.plain_width, self.config.value_width), dim=1)
        self.to_values_QWV = values_QVW.transpose(1, 2)
        # With the layer gone, nothing packs its weight into a copy that is never read.
        self.kv_b_proj = None

    def add_to(
        self, residual_NE: torch.Tensor, x_NE: torch.Tensor, cos_sin_N1R: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Attend over *x_NE*, and return the residual plus the result. *cos_sin_N1R* is for `ops.rotary_pairs`."""
        config = self.config
        latent_NW, rotated_NR = self.kv_a_proj_with_mqa(x_NE).split((config.latent_width, config.rope_width), -1)
        rotated_N1R = self.ops.rotary_pairs(rotated_NR.unsqueeze(1), cos_sin_N1R)
        latent_NC = torch.cat((self.kv_a_layernorm(latent_NW), rotated_N1R.squeeze(1)), -1)
        attended_NQW = context.backend.latent(
            self._absorbed(x_NE, cos_sin_N1R),
            latent_NC,
            self.layer,
            context,
            value_width=config.latent_width,
            scale=config.score_scale,
        )
        values_QNV = attended_NQW.transpose(0, 1) @ self.to_values_QWV
        return self.o_proj.add_to(residual_NE, values_QNV.transpose(0, 1).flatten(1))

    def _absorbed(self, x_NE: torch.Tensor, cos_sin_N1R: torch.Tensor) -> torch.Tensor:
        """Return queries [N, Q, C], to be multiplied with latents instead of keys."""
        q_NQH = self.queries(x_NE).unflatten(1, (self.num_heads, -1))
        q_NQK, q_NQR = q_NQH.split((self.config.plain_width, self.config.rope_width), -1)
        q_QNW = q_NQK.transpose(0, 1) @ self.to_keys_QKW
        return torch.cat((q_QNW.transpose(0, 1), self.ops.rotary_pairs(q_NQR, cos_sin_N1R)), -1)


class ExpertRouter(Layer):
    """Picks each token's experts, computing in float32.

    *e_score_correction_bias* changes which experts are chosen, but not their weights (DeepSeek-V3, arXiv:2412.19437,
    section 2.1.2). The bias decides between experts with nearly equal scores, so it stays float32, as in the releases.
    Shapes: X experts, G groups, T experts per token.
    """

    float32 = ("e_score_correction_bias",)

    def __init__(self, hidden_size: int, config: ExpertConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False)

    def forward(self, x_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 [N, T] and weights float32 [N, T] of each token's experts."""
        scores_NX = nn.functional.linear(x_NE.float(), self.weight.float()).sigmoid()
        choice_NX = self._within_groups(scores_NX + self.e_score_correction_bias)
        ids_NT = choice_NX.topk(self.config.num_chosen, dim=-1, sorted=False).indices
        weights_NT = scores_NX.gather(1, ids_NT)
        if self.config.normalised:
            weights_NT = weights_NT / (weights_NT.sum(-1, keepdim=True) + 1e-20)
        return ids_NT, weights_NT * self.config.scaling

    def _within_groups(self, choice_NX: torch.Tensor) -> torch.Tensor:
        """Exclude experts outside a token's best groups. A group's score is the sum of its two best experts' scores."""
        config = self.config
        if config.num_groups == 1:
            return choice_NX
        grouped_NGX: torch.Tensor = choice_NX.unflatten(1, (config.num_groups, -1))
        best_NT = grouped_NGX.topk(2, dim=-1).values.sum(-1).topk(config.num_chosen_groups, dim=-1).indices
        outside_NG = torch.ones_like(grouped_NGX[..., 0], dtype=torch.bool).scatter_(1, best_NT, False)
        return grouped_NGX.masked_fill(outside_NG.unsqueeze(-1), float("-inf")).flatten(1)


class ExpertMlp(nn.Module):
    """Each token's routed experts, plus the shared experts, which form one MLP."""

    def __init__(self, hidden_size: int, config: ExpertConfig, ranks: Ranks) -> None:
        super().__init__()
        self.gate = ExpertRouter(hidden_size, config)
        self.experts = Experts(config.num_experts, hidden_size, config.intermediate_size, ranks)
        self.shared_experts = GatedMlp(hidden_size, config.shared_intermediate_size, ranks)

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor) -> torch.Tensor:
        """Return *residual_NE* plus the experts' sum."""
        summand_NE = self.shared_experts.add_summand(self.experts.summand(x_NE, *self.gate(x_NE)), x_NE)
        return residual_NE + self.experts.ranks.all_reduce(summand_NE)


def routed_mlp(config: DecoderConfig, experts: ExpertConfig | None, ranks: Ranks) -> GatedMlp | ExpertMlp:
    """Return the *experts* of a layer, or its MLP if it has none."""
    if experts is None:
        return GatedMlp(config.hidden_size, config.intermediate_size, ranks)
    return ExpertMlp(config.hidden_size, experts, ranks)


class DeepseekTextDecoder(TextDecoder):
    """Maps embeddings to hidden states."""

    def __init__(self, config: DeepseekTextConfig, ranks: Ranks = ALONE) -> None:
        super().__init__(config, ranks, (_layer(config, layer, ranks) for layer in range(config.num_layers)))

    def rotation(self, angles: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return complex numbers [N, 1, R / 2] for `ops.rotary_pairs`."""
        return cos_sin_pairs(angles) * self.config.rope.magnitude


def _layer(config: DeepseekTextConfig, layer: int, ranks: Ranks) -> DecoderLayer:
    experts = config.experts if layer >= config.num_dense_layers else None
    return DecoderLayer(config, LatentAttention(config, layer, ranks.attention), routed_mlp(config, experts, ranks))
