"""Operations (saccade.nn.ops) in half precision on a GPU, in one launch each: by Triton, or within a product.

Triton's kernels compute in float32 and round once. With TRITON_INTERPRET=1 they compute on a CPU: so tests run them,
and they have never run on a GPU. Shapes: N tokens, H heads, Q of queries, K of keys or values, D head size, C rotated
channel pairs, I inputs, O outputs.
"""

import torch
import triton

from saccade.nn.backends.compilers import no_c_compiler
from saccade.nn.backends.triton_kernels import conv_kernel, gated_kernel, heads_kernel
from saccade.nn.context import KvCache
from saccade.nn.delta_rule import Trail, split
from saccade.nn.ops import GELU_TANH, SILU, Activation, CosSin, PlainLinear

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
    """Compute ops.cached_heads. Return None for a cache in another number format than the heads', or other sizes."""
    num_tokens, num_heads, size = qkv_NHD.shape
    own_form = cache.keys.dtype, cache.values.dtype, cache.values.shape[-1]
    if own_form != (qkv_NHD.dtype, qkv_NHD.dtype, size) or qkv_NHD.stride()[1:] != (size, 1):
        return None
    num_rotated = num_heads - num_kv_heads
    rotated = qkv_NHD.new_empty(num_tokens, num_rotated, size)
    cos, sin = cos_sin
    heads_kernel[(num_tokens, num_heads)](
        *(qkv_NHD, qkv_NHD if weight_HD is None else weight_HD, cos, sin, slot_mapping, rotated),
        *(cache.keys, cache.values, qkv_NHD.stride(0), eps),
        ROTATED=num_rotated,
        KV_HEADS=num_kv_heads,
        SIZE=size,
        HALF=cos.shape[-1] // 2,
        WIDTH=1 << (size - 1).bit_length(),
        HAS_NORM=weight_HD is not None,
        num_warps=1,
    )
    q_NQD, k_NKD = rotated.split_with_sizes((num_rotated - num_kv_heads, num_kv_heads), 1)
    return q_NQD, (k_NKD, qkv_NHD[:, num_rotated:])


def gated_activation(x_NI: torch.Tensor, activation: Activation) -> torch.Tensor | None:
    """Compute ops.gated_activation. Return None for other activations than SiLU and GELU by tanh, and for gaps."""
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

    Return None for states to keep, other activations than SiLU, more taps than a program has tokens, and states in
    another format.
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
            states.index_copy_(0, own, x_NC[tokens][1 - num_taps :].unsqueeze(0))
    return output


class AddingLinear(PlainLinear):
    """PlainLinear whose product adds to the residual in place, in float32."""

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b [N, O] in the residual's memory."""
        output = residual_NO.addmm_(x_NI, self.weight_OI.t())
        return output if self.bias_O is None else output.add_(self.bias_O)


def pack_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> AddingLinear:
    """Compute ops.pack_linear."""
    return AddingLinear(weight_OI, bias_O)
