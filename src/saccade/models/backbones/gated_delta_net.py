"""The gated delta net, a linear attention layer whose state has the same size for any context length.

Formulas: transformers, modeling_qwen3_5.py (Qwen3_5GatedDeltaNet); Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464.
Shapes: N tokens, E hidden size, K key heads, H value heads, D key width, W value width, T taps of the convolution,
C = 2 * K * D + H * W its channels.
"""

import torch
from torch import nn

from saccade.models.backbones.text_config import DeltaNetConfig
from saccade.nn.context import ForwardContext, RecurrentState
from saccade.nn.delta_rule import Gates, RuleHeads, Trail
from saccade.nn.layers import Layer, Linear, RMSNorm
from saccade.nn.ops import SILU, CosSin
from saccade.nn.parallel import Ranks, Sharding, shards_of


class CausalConv(Layer):
    """The taps of a depthwise convolution over queries, keys and values. The heads are divided among the ranks."""

    def __init__(self, config: DeltaNetConfig, ranks: Ranks) -> None:
        super().__init__()
        channels = Sharding(config.widths, 0, tuple(shards_of(heads, ranks) for heads in config.heads))
        self.shardings = {"weight": channels}
        shape = sum(channels.lengths()), 1, config.num_taps
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self.taps_TC = torch.empty(0)

    def finish(self) -> None:
        """Lay out the loaded taps for `ops.causal_conv`."""
        self.taps_TC = self.weight.squeeze(1).t().float().contiguous()


class GatedDeltaNet(Layer):
    """Queries, keys and values pass through a short convolution and the delta rule; the result is normed and gated."""

    float32 = ("A_log", "dt_bias")

    def __init__(self, config: DeltaNetConfig, hidden_size: int, norm_eps: float, layer: int, ranks: Ranks) -> None:
        super().__init__()
        num_heads = config.num_value_heads
        width = num_heads * config.value_width
        self.layer = layer
        self.key_width, self.value_width = config.key_width, config.value_width
        self.in_proj_qkv = Linear(
            hidden_size, config.widths, bias=False, split="outputs", units=config.heads, ranks=ranks
        )
        self.in_proj_z = Linear(hidden_size, width, bias=False, split="outputs", units=(num_heads,), ranks=ranks)
        self.in_proj_ba = Linear(
            hidden_size, (num_heads,) * 2, bias=False, split="outputs", units=(num_heads,) * 2, ranks=ranks
        )
        self.conv1d = CausalConv(config, ranks)
        self.A_log = nn.Parameter(torch.empty(ranks.divide(num_heads)), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(ranks.divide(num_heads)), requires_grad=False)
        self.shardings = dict.fromkeys(self.float32, Sharding((num_heads,), 0, (shards_of(num_heads, ranks),)))
        self.norm = RMSNorm(config.value_width, norm_eps)
        self.out_proj = Linear(width, hidden_size, bias=False, split="inputs", ranks=ranks)
        self.norm_weight = torch.empty(0)

    @property
    def rule_heads(self) -> RuleHeads:
        """The heads of the delta rule on this rank."""
        keys = self.in_proj_qkv.partitions[0]
        return RuleHeads(keys // self.key_width, len(self.A_log), self.key_width, self.value_width)

    def finish(self) -> None:
        """Convert the loaded norm weights to float32."""
        self.norm_weight = self.norm.weight.float()

    def add_to(self, residual_NE: torch.Tensor, x_NE: torch.Tensor, _: CosSin, context: ForwardContext) -> torch.Tensor:
        """Return the residual plus the layer's result for *x_NE*; update the states of the step's sequences."""
        layout, state = context.layout, context.cache(self.layer, RecurrentState)
        qkv_NC, ba_NH = self.in_proj_qkv(x_NE), self.in_proj_ba(x_NE)
        if layout.turns:
            output_NHW = x_NE.new_empty((len(x_NE), len(self.A_log), self.value_width), dtype=torch.float32)
            for turn in layout.turns:
                part = self._mix(qkv_NC[turn.tokens], ba_NH[turn.tokens], state, turn.rows, turn.lengths, turn.trail)
                output_NHW.index_copy_(0, turn.tokens, part.float())
                state.save(turn)
        else:
            output_NHW = self._mix(qkv_NC, ba_NH, state, layout.rows, layout.query_lengths)
        gated_NC = self.ops.gated_norm(output_NHW, self.in_proj_z(x_NE), self.norm_weight, self.norm.eps)
        return self.out_proj.add_to(residual_NE, gated_NC)

    def _mix(
        self,
        qkv_NC: torch.Tensor,
        ba_NH: torch.Tensor,
        state: RecurrentState,
        rows: torch.Tensor,
        lengths: tuple[int, ...],
        trail: Trail = None,
    ) -> torch.Tensor:
        """Return the delta rule's result for projected tokens, [N, H, W]; update the live states in *rows*."""
        states, inputs = state.live
        qkv_NC = self.ops.causal_conv(qkv_NC, self.conv1d.taps_TC, inputs, rows, lengths, SILU, trail)
        q_NC, k_NC, v_NC = qkv_NC.split_with_sizes(self.in_proj_qkv.partitions, -1)
        q_NKD, k_NKD = (part.unflatten(-1, (-1, self.key_width)) for part in (q_NC, k_NC))
        v_NHW = v_NC.unflatten(-1, (-1, self.value_width))
        b_NH, a_NH = ba_NH.chunk(2, -1)
        gates = Gates(self.A_log, self.dt_bias, a_NH, b_NH)
        return self.ops.gated_delta_rule(q_NKD, k_NKD, v_NHW, gates, states, rows, lengths, trail)
