"""The decoder of Llama, Mistral and Phi-3: grouped-query attention with rotary positions, and SwiGLU.

Formulas: transformers 5.23, modeling_llama.py, modeling_mistral.py, modeling_phi3.py. Shapes: N tokens, R rows to
predict from, E hidden size, Q query heads, K key/value heads, H = Q + K, D head size.
"""

import torch

from saccade.models.backbones.decoder import DecoderLayer, GatedMlp, RotaryDecoder
from saccade.models.backbones.llama_config import LlamaTextConfig
from saccade.models.network import Target
from saccade.nn.context import ForwardContext
from saccade.nn.layers import Attention, Layer, Linear
from saccade.nn.ops import CosSin
from saccade.nn.parallel import ALONE, Ranks
from saccade.nn.rope import cos_sin

PARTS = (
    (".q_proj.", ".qkv_proj.", 0),
    (".k_proj.", ".qkv_proj.", 1),
    (".v_proj.", ".qkv_proj.", 2),
    (".gate_proj.", ".gate_up_proj.", 0),
    (".up_proj.", ".gate_up_proj.", 1),
)


def decoder_target(name: str, decoder: str) -> Target:
    """Return the target of a tensor of LlamaTextDecoder or of the head. *decoder* is its place in the network.

    *name* is the release's: `model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`. Releases store queries, keys
    and values, and gate and up, either one by one, or fused in this order (`qkv_proj`, `gate_up_proj`).
    """
    if name.startswith("lm_head."):
        return Target(name)
    name = f"{decoder}.{name.removeprefix('model.')}"
    for theirs, ours, partition in PARTS:
        if theirs in name:
            return Target(name.replace(theirs, ours), partition)
    return Target(name)


class LlamaAttention(Layer):
    """One matrix computes queries, keys and values; queries and keys are rotated."""

    def __init__(self, config: LlamaTextConfig, layer: int, ranks: Ranks) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, bias = config.head_dim, config.attention_bias
        units = (num_heads, num_kv_heads, num_kv_heads)
        widths = tuple(count * self.head_dim for count in units)
        self.qkv_proj = Linear(config.hidden_size, widths, bias, split="outputs", units=units, ranks=ranks)
        self.o_proj = Linear(num_heads * self.head_dim, config.hidden_size, bias, split="inputs", ranks=ranks)
        self.attention = Attention(
            layer, ranks.divide(num_heads), ranks.share(num_kv_heads), window=config.sliding_window
        )

    def add_to(
        self, residual_NE: torch.Tensor, x_NE: torch.Tensor, cos_sin: CosSin, context: ForwardContext
    ) -> torch.Tensor:
        """Attend over *x_NE*, and return the residual plus the result."""
        num_heads, num_kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        qkv_NHD = self.qkv_proj(x_NE).view(x_NE.shape[0], -1, self.head_dim)
        qk_NHD, v_NKD = qkv_NHD.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        qk_NHD = self.ops.rotary(qk_NHD, cos_sin)
        q_NQD, k_NKD = qk_NHD.split_with_sizes((num_heads, num_kv_heads), dim=1)
        return self.o_proj.add_to(residual_NE, self.attention(q_NQD, k_NKD, v_NKD, context))


class LlamaTextDecoder(RotaryDecoder):
    """Maps embeddings to hidden states."""

    def __init__(self, config: LlamaTextConfig, ranks: Ranks = ALONE) -> None:
        layers = (_layer(config, layer, ranks) for layer in range(config.num_layers))
        super().__init__(config, layers, config.head_dim)

    def rotation(self, angles: torch.Tensor, dtype: torch.dtype) -> CosSin:
        """Return cosines and sines for `ops.rotary`."""
        return cos_sin(angles, dtype, self.rope.magnitude)


def _layer(config: LlamaTextConfig, layer: int, ranks: Ranks) -> DecoderLayer:
    attention = LlamaAttention(config, layer, ranks.attention)
    mlp = GatedMlp(config.hidden_size, config.intermediate_size, ranks, bias=config.mlp_bias)
    return DecoderLayer(attention, mlp, config.hidden_size, config.norm_eps)
