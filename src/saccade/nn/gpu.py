"""Operations (saccade.nn.ops) in half precision on a GPU, most in one launch: by Triton, or within a product.

Triton's kernels compute in float32 and round once, or twice for a float8 cache. With TRITON_INTERPRET=1 they compute on
a CPU. Tests run them in this way; they have never run on a GPU. Shapes: N tokens, H heads, Q query heads, K key/value
heads, D head size, C rotated channel pairs, I inputs, O outputs.
"""

import torch
import triton

from saccade.nn.backends.compilers import no_c_compiler
from saccade.nn.backends.triton_experts import choice_kernel
from saccade.nn.backends.triton_kernels import conv_kernel, gated_kernel, heads_kernel, norm_kernel, pairs_kernel
from saccade.nn.context import KvCache
from saccade.nn.delta_rule import Trail, split
from saccade.nn.ops import GELU_TANH, SILU, Activation, CosSin, PlainLinear

FLOAT8 = torch.float8_e4m3fn
WITH_FLOAT8 = (8, 9)
"""The first compute capability with it."""
NORM_COLUMNS = 512
"""Channels of a warp that normalises; more would not fit into its registers."""
PAIRED_HEADS = 16
"""Heads of a token that a program rotates by pairs."""
MOST_EXPERTS = 1024
"""Those that a warp chooses from: 32 for each of its threads."""
TILE = 1024
"""Columns of one program."""
CONV_TOKENS, CONV_COLUMNS = 16, 128
"""Tokens and channels of one program of the convolution."""

if (reason := no_c_compiler()) is not None:
    raise ImportError(reason)


def cached_heads(
    qkv_NHD: torch.Tensor,
    num_kv_heads: int,
    weight_HD: torch.Tensor | None,
    eps: float,
    cos_sin: CosSin,
    cache: KvCache,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None:
    """Compute ops.cached_heads.

    Return None if the cache is neither in the heads' dtype nor in float8, which older GPUs do not have. Also return
    None if its values have another size, or if there are gaps between heads or channels.
    """
    num_tokens, num_heads, size = qkv_NHD.shape
    form = cache.keys.dtype
    if form not in (qkv_NHD.dtype, FLOAT8) or (cache.values.dtype, cache.values.shape[-1]) != (form, size):
        return None
    if qkv_NHD.stride()[1:] != (size, 1):
        return None
    is_rounded, num_rotated = form != qkv_NHD.dtype, num_heads - num_kv_heads
    if is_rounded and qkv_NHD.is_cuda and torch.cuda.get_device_capability(qkv_NHD.device) < WITH_FLOAT8:
        return None
    values = qkv_NHD[:, num_rotated:]
    read_values = torch.empty_like(values, memory_format=torch.contiguous_format) if is_rounded else values
    rotated = qkv_NHD.new_empty(num_tokens, num_rotated, size)
    cos, sin = cos_sin
    heads_kernel[(num_tokens, num_heads)](
        *(qkv_NHD, qkv_NHD if weight_HD is None else weight_HD, cos, sin, slot_mapping, rotated),
        *(read_values, cache.keys, cache.values, qkv_NHD.stride(0), eps, cache.key_scale, cache.value_scale),
        ROTATED=num_rotated,
        KV_HEADS=num_kv_heads,
        SIZE=size,
        HALF=cos.shape[-1] // 2,
        WIDTH=1 << (size - 1).bit_length(),
        HAS_NORM=weight_HD is not None,
        LARGEST=torch.finfo(FLOAT8).max if is_rounded else 0.0,
        num_warps=1,
    )
    q_NQD, k_NKD = rotated.split_with_sizes((num_rotated - num_kv_heads, num_kv_heads), 1)
    return q_NQD, (k_NKD, read_values)


def rotary_pairs(x_NHD: torch.Tensor, cos_sin_N1C: torch.Tensor) -> torch.Tensor | None:
    """Compute ops.rotary_pairs. Return None for gaps between channels or angles."""
    if x_NHD.stride(2) != 1 or not cos_sin_N1C.is_contiguous():
        return None
    num_tokens, num_heads, size = x_NHD.shape
    output = x_NHD.new_empty(x_NHD.shape)
    pairs_kernel[(num_tokens, triton.cdiv(num_heads, PAIRED_HEADS))](
        *(x_NHD, torch.view_as_real(cos_sin_N1C), output, num_heads, *x_NHD.stride()[:2]),
        PAIRS=size // 2,
        HEADS=PAIRED_HEADS,
        WIDTH=1 << (size // 2 - 1).bit_length(),
    )
    return output


def rms_norm(x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor | None:
    """Compute ops.rms_norm. Return None for gaps, and if the dtypes are equal: then torch needs one launch, too."""
    if weight_E.dtype == x_NE.dtype or not x_NE.is_contiguous():
        return None
    output = torch.empty_like(x_NE)
    _norm(x_NE.view(-1, 1, x_NE.shape[-1]), weight_E, output, eps)
    return output


def gated_norm(x_NHW: torch.Tensor, gate_NC: torch.Tensor, weight_W: torch.Tensor, eps: float) -> torch.Tensor | None:
    """Compute ops.gated_norm. Return None for gaps between heads or channels."""
    if x_NHW.stride()[1:] != (x_NHW.shape[2], 1) or gate_NC.stride(1) != 1:
        return None
    output = gate_NC.new_empty(gate_NC.shape)
    _norm(x_NHW, weight_W, output, eps, gate_NC)
    return output


def _norm(
    x_NHW: torch.Tensor, weight_W: torch.Tensor, output: torch.Tensor, eps: float, gate_NC: torch.Tensor | None = None
) -> None:
    """Launch the norm of each head."""
    num_tokens, num_heads, size = x_NHW.shape
    gate = x_NHW if gate_NC is None else gate_NC
    norm_kernel[(num_tokens, num_heads)](
        *(x_NHW, weight_W, gate, output, eps, x_NHW.stride(0), gate.stride(0)),
        SIZE=size,
        WIDTH=(width := 1 << (size - 1).bit_length()),
        HAS_GATE=gate_NC is not None,
        num_warps=max(1, min(8, width // NORM_COLUMNS)),
    )


def softmax_top_k(logits_NE: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute ops.softmax_top_k; in a tie, choose the first expert. Return None for gaps or over MOST_EXPERTS."""
    num_tokens, num_experts = logits_NE.shape
    if num_experts > MOST_EXPERTS or logits_NE.stride(1) != 1:
        return None
    ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_NE.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_NE.device)
    choice_kernel[(num_tokens,)](
        *(logits_NE, ids, weights, logits_NE.stride(0)),
        EXPERTS=num_experts,
        WIDTH=1 << (num_experts - 1).bit_length(),
        CHOICES=top_k,
        SLOTS=1 << (top_k - 1).bit_length(),
        RENORMALISES=renormalise,
        num_warps=1,
    )
    return ids, weights


def gated_activation(x_NI: torch.Tensor, activation: Activation) -> torch.Tensor | None:
    """Compute ops.gated_activation. Return None for activations other than SiLU and GELU by tanh, and for gaps."""
    if (activation is not SILU and activation is not GELU_TANH) or not x_NI.is_contiguous():
        return None
    width = x_NI.shape[1] // 2
    output = x_NI.new_empty(len(x_NI), width)
    grid = len(x_NI), triton.cdiv(width, TILE)
    gated_kernel[grid](x_NI, output, width, COLUMNS=TILE, IS_SILU=activation is SILU)
    return output


def causal_conv(
    x_NC: torch.Tensor,
    taps_TC: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    lengths: tuple[int, ...],
    activation: Activation,
    trail: Trail = None,
) -> torch.Tensor | None:
    """Compute ops.causal_conv: one launch for all single tokens, and one or two for each longer sequence.

    Return None if the state after each token is to be kept (*trail*), and for activations other than SiLU. Also return
    None for more taps than a program has tokens, for states in another dtype, and for gaps between channels.
    """
    num_taps, num_channels = taps_TC.shape
    if (
        trail is not None
        or activation is not SILU
        or num_taps > CONV_TOKENS
        or states.dtype != x_NC.dtype
        or x_NC.stride(1) != 1
    ):
        return None
    output = x_NC.new_empty(x_NC.shape)
    num_singles, spans = split(lengths)
    launches = [(slice(num_singles), rows[:num_singles], 1)] if num_singles else []
    launches += [(span, rows[index : index + 1], lengths[index]) for index, span in spans]
    for tokens, own, length in launches:
        grid = len(own), triton.cdiv(length, CONV_TOKENS), triton.cdiv(num_channels, CONV_COLUMNS)
        conv_kernel[grid](
            *(x_NC[tokens], taps_TC, states, own, output[tokens], length, num_channels, x_NC.stride(0)),
            TAPS=num_taps,
            TOKENS=CONV_TOKENS,
            COLUMNS=CONV_COLUMNS,
        )
        if length > CONV_TOKENS:
            states.index_copy_(0, own.long(), x_NC[tokens][1 - num_taps :].unsqueeze(0))
    return output


class AddingLinear(PlainLinear):
    """PlainLinear whose product adds to the residual in place, and accumulates in float32."""

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b [N, O] in the residual's memory."""
        output = residual_NO.addmm_(x_NI, self.weight_OI.t())
        return output if self.bias_O is None else output.add_(self.bias_O)


def pack_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> AddingLinear:
    """Compute ops.pack_linear."""
    return AddingLinear(weight_OI, bias_O)
