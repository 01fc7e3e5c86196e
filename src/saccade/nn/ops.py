"""Operations other than attention: a plain PyTorch function for each, and how faster versions take their place.

The plain functions run anywhere and are the reference. `FASTER` names modules with faster versions by operation, device
type and dtype. Such a function has the operation's name and signature, and returns None for shapes that it declines.
`resolve` chooses once, when a model is loaded; layers call what it chose (saccade.nn.layers.Layer.ops).

Shapes: N tokens, E width, H heads, D head size, C = D / 2 channel pairs, I inputs, O outputs, K experts of a token.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import structlog
import torch
from torch.nn import functional

from saccade.nn.context import KvCache
from saccade.nn.delta_rule import Gates, Trail, causal_conv, gated_delta_rule
from saccade.nn.libraries import Unavailable, attempt

logger = structlog.get_logger(__name__)

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Maps the outputs [N, O] of a linear layer to as many, or to fewer: each token by itself."""

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine [N, 1, 2C] of each token's C angles, as saccade.nn.rope.cos_sin returns them."""


GELU: Activation = functional.gelu
GELU_TANH: Activation = partial(functional.gelu, approximate="tanh")
SILU: Activation = functional.silu
OF_STATES: Mapping[tuple[str, str, torch.dtype], str] = MappingProxyType(
    {("gated_delta_rule", "cuda", torch.bfloat16): "saccade.nn.flashinfer_delta"}
)
"""Faster versions for layers with recurrent states alone."""


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x), an approximation of GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415)."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"gelu_pytorch_tanh": GELU_TANH, "gelu": GELU, "quick_gelu": quick_gelu, "silu": SILU}
)
"""Activations by their names in config.json."""


class PackedLinear(ABC):
    """The weight and bias of a linear layer, in the layout that an implementation multiplies."""

    @abstractmethod
    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""

    def add_to(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor:
        """Return residual + x W^T + b [N, O]; may overwrite the residual."""
        return residual_NO + self.apply(x_NI, None)

    def possible_rows(self, shape: tuple[int, int]) -> Iterable[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield functions from numbers int64 [N] of outputs to what may be their weights [N, I], for a *shape* [O, I].

        A layout may be a guess. So the caller compares some rows with those that it knows.
        """
        return ()

    def kernels(self, most_tokens: int) -> Mapping[Hashable, int]:
        """Return the kernels that are compiled at the first product that needs them, for 1 to *most_tokens* tokens.

        Each is mapped to a number of tokens that needs it. Other layers may share a kernel.
        """
        return {}


@dataclass(frozen=True)
class PlainLinear(PackedLinear):
    """PackedLinear with the weight as it was loaded."""

    weight_OI: torch.Tensor
    bias_O: torch.Tensor | None

    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""
        output_NO = functional.linear(x_NI, self.weight_OI, self.bias_O)
        return output_NO if activation is None else activation(output_NO)


@dataclass(frozen=True)
class JoinedLinear(PackedLinear):
    """PackedLinear of layers that read the same input, and differ in their formats; their outputs follow each other."""

    layers: tuple[PackedLinear, ...]

    def apply(self, x_NI: torch.Tensor, activation: Activation | None) -> torch.Tensor:
        """Return activation(x W^T + b) [N, O]."""
        output_NO = torch.cat([layer.apply(x_NI, None) for layer in self.layers], 1)
        return output_NO if activation is None else activation(output_NO)

    def kernels(self, most_tokens: int) -> Mapping[Hashable, int]:
        """See PackedLinear.kernels."""
        return {kernel: count for layer in self.layers for kernel, count in layer.kernels(most_tokens).items()}


class ExpertShare(NamedTuple):
    """The equal part of *num_experts* that rank *rank* of *num_ranks* holds."""

    num_experts: int
    rank: int
    num_ranks: int


class PackedExperts(ABC):
    """The matrices of this rank's experts, in the layout that an implementation multiplies."""

    @abstractmethod
    def apply(self, x_NE: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Return the sum of `experts` for this rank's experts, [N, E]; the ids number the experts of all ranks."""

    def kernels(self, most_tokens: int) -> Mapping[Hashable, int]:
        """See PackedLinear.kernels."""
        return {}


class ExpertMatrices(Protocol):
    """The weight of each expert: a tensor [experts, O, I], or an object that unpacks only requested experts."""

    def __len__(self) -> int: ...

    def __getitem__(self, expert: int, /) -> torch.Tensor:
        """Return the weight [O, I] of one expert."""


def pack_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PackedLinear:
    """Return the linear layer of a loaded weight and bias."""
    return PlainLinear(weight_OI, bias_O)


def rms_norm(x_NE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, row by row (Zhang & Sennrich 2019, arXiv:1910.07467).

    With a weight in float32, everything is computed in float32 and rounded once.
    """
    return functional.rms_norm(x_NE.to(weight_E.dtype), x_NE.shape[-1:], weight_E, eps).to(x_NE.dtype)


def gated_norm(x_NHW: torch.Tensor, gate_NC: torch.Tensor, weight_W: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `rms_norm` of each head times SiLU of its gates: [N, C], C = H * W, in the dtype of the gates.

    Everything is computed in float32, the dtype of *weight_W*, and rounded once. The heads may have the gates' dtype.
    """
    normed_NHW = rms_norm(x_NHW.float(), weight_W, eps)
    return (normed_NHW.flatten(1) * functional.silu(gate_NC.float())).to(gate_NC.dtype)


def rotary(x_NHD: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
    """Rotate the channel pairs (i, i + C) of each head by cosines and sines [N, 1, 2C]; other channels stay."""
    cos, sin = cos_sin
    width = cos.shape[-1]
    rotated, rest = x_NHD[..., :width], x_NHD[..., width:]
    rotated = torch.addcmul(rotated * cos, rotated.roll(width // 2, -1), sin)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def norm_rotary(x_NHD: torch.Tensor, weight_HD: torch.Tensor, eps: float, cos_sin: CosSin) -> torch.Tensor:
    """Normalise each head by its RMS, scale it by its weight, and rotate it.

    With a weight in float32, the norm is computed in float32 and rounded once.
    """
    normed_NHD = functional.rms_norm(x_NHD.to(weight_HD.dtype), x_NHD.shape[-1:], None, eps) * weight_HD
    return rotary(normed_NHD.to(x_NHD.dtype), cos_sin)


def cached_heads(
    qkv_NHD: torch.Tensor,
    num_kv_heads: int,
    weight_HD: torch.Tensor | None,
    eps: float,
    cos_sin: CosSin,
    cache: KvCache,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Rotate queries and keys, after a norm if there is *weight_HD*, and write keys and values to their slots.

    In *qkv_NHD*, *num_kv_heads* heads of keys follow those of queries, and then as many of values. Return the queries,
    and the keys and values as a read of the cache returns them.
    """
    num_rotated = qkv_NHD.shape[1] - num_kv_heads
    qk_NHD, v_NKD = qkv_NHD.split_with_sizes((num_rotated, num_kv_heads), 1)
    qk_NHD = rotary(qk_NHD, cos_sin) if weight_HD is None else norm_rotary(qk_NHD, weight_HD, eps, cos_sin)
    q_NQD, k_NKD = qk_NHD.split_with_sizes((num_rotated - num_kv_heads, num_kv_heads), 1)
    return q_NQD, cache.write(slot_mapping, k_NKD, v_NKD)


def rotary_pairs(x_NHD: torch.Tensor, cos_sin_N1C: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs (2i, 2i + 1) of each head in float32, as products of complex numbers.

    *cos_sin_N1C* complex64 is from saccade.nn.rope.cos_sin_pairs.
    """
    pairs_NHC = torch.view_as_complex(x_NHD.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_NHC * cos_sin_N1C).flatten(-2).to(x_NHD.dtype)


def gated_activation(x_NI: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up [N, I / 2] for rows that hold I / 2 gates, and then as many ups.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = x_NI.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def normalise_pixels(
    pixels_NI: torch.Tensor, mean_C: torch.Tensor, std_C: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return (x - mean) / std of uint8 rows [N, channels * values], computed in float32 and rounded to *dtype* once."""
    values_NCV = pixels_NI.view(pixels_NI.shape[0], len(mean_C), -1).float()
    return values_NCV.sub_(mean_C.unsqueeze(-1)).div_(std_C.unsqueeze(-1)).flatten(1).to(dtype)


def softmax_top_k(logits_NE: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids int64 [N, K] and weights float32 [N, K] of each token's *top_k* most probable experts.

    Probabilities are the softmax of *logits_NE*. With *renormalise*, the weights of a token sum to 1. Source:
    transformers, modeling_qwen3_moe.py, Qwen3MoeTopKRouter.
    """
    weights_NK, expert_ids_NK = logits_NE.float().softmax(-1).topk(top_k, -1)
    return expert_ids_NK, weights_NK / weights_NK.sum(-1, keepdim=True) if renormalise else weights_NK


def experts(
    x_NE: torch.Tensor,
    gate_up: ExpertMatrices,
    down: ExpertMatrices,
    expert_ids_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    activation: Activation = SILU,
) -> torch.Tensor:
    """Return for each token the sum of its experts' down(activation(gate(x)) * up(x)), weighted in float32: [N, E].

    gate_up[i] holds the gates of expert i, then as many ups: [2I, E]; down[i] is [E, I]. Ids int64 below 0, or not
    below the number of experts, belong to other ranks and add nothing. A token's ids are distinct. The cost grows with
    the number of chosen experts, not of all experts. The host waits for that number.
    """

    def result_of(expert: int, rows_ME: torch.Tensor) -> torch.Tensor:
        gated = gated_activation(functional.linear(rows_ME, gate_up[expert]), activation)
        return functional.linear(gated, down[expert])

    return mixture(x_NE, expert_ids_NK, weights_NK, len(gate_up), result_of)


def mixture(
    x_NE: torch.Tensor,
    expert_ids_NK: torch.Tensor,
    weights_NK: torch.Tensor,
    num_experts: int,
    result_of: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the sum of `experts`, [N, E]; *result_of* computes the results [M, E] of one expert for M tokens."""
    num_choices = expert_ids_NK.shape[1]
    sorted_ids, order = expert_ids_NK.flatten().sort(stable=True)
    unique_ids, counts = sorted_ids.unique_consecutive(return_counts=True)
    share = weights_NK.flatten().float().unsqueeze(1)
    sum_NE = torch.zeros(x_NE.shape, dtype=torch.float32, device=x_NE.device)
    for expert, places in zip(unique_ids.tolist(), order.split_with_sizes(counts.tolist()), strict=True):
        if 0 <= expert < num_experts:
            tokens = places // num_choices
            results_ME = result_of(expert, x_NE.index_select(0, tokens))
            sum_NE.index_add_(0, tokens, results_ME * share.index_select(0, places))
    return sum_NE.to(x_NE.dtype)


@dataclass(frozen=True, slots=True)
class Operations:
    """An implementation of each operation; the defaults are the plain ones.

    *kernels* names modules with `pack_linear` or `pack_experts` for quantised weights, by function and kind of format.
    """

    pack_linear: Callable[[torch.Tensor, torch.Tensor | None], PackedLinear] = pack_linear
    cached_heads: Callable[
        [torch.Tensor, int, torch.Tensor | None, float, CosSin, KvCache, torch.Tensor],
        tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
    ] = cached_heads
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rms_norm
    gated_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor] = gated_norm
    rotary_pairs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = rotary_pairs
    gated_activation: Callable[[torch.Tensor, Activation], torch.Tensor] = gated_activation
    softmax_top_k: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]] = softmax_top_k
    experts: Callable[
        [torch.Tensor, ExpertMatrices, ExpertMatrices, torch.Tensor, torch.Tensor, Activation], torch.Tensor
    ] = experts
    causal_conv: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...], Activation, Trail], torch.Tensor
    ] = causal_conv
    gated_delta_rule: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, Gates, torch.Tensor, torch.Tensor, tuple[int, ...], Trail],
        torch.Tensor,
    ] = gated_delta_rule
    kernels: Mapping[tuple[str, str], str] = field(default_factory=dict)


PLAIN = Operations()
FASTER: Mapping[tuple[str, str, torch.dtype], str] = MappingProxyType(
    {
        ("pack_linear", "cpu", torch.bfloat16): "saccade.nn.cpu",
        ("rotary_pairs", "cpu", torch.bfloat16): "saccade.nn.cpu",
        ("experts", "cuda", torch.bfloat16): "saccade.nn.grouped_experts",
        **{
            (operation, "cuda", dtype): "saccade.nn.gpu"
            for operation in (
                *("pack_linear", "cached_heads", "rms_norm", "gated_norm", "causal_conv", "gated_activation"),
                *("rotary_pairs", "softmax_top_k"),
            )
            for dtype in (torch.float16, torch.bfloat16)
        },
    }
)

KERNELS: Mapping[tuple[str, str, torch.dtype, str], str] = MappingProxyType(
    {
        ("pack_linear", "cuda", torch.bfloat16, "fp8_blocks"): "saccade.nn.formats.flashinfer_fp8",
        ("pack_linear", "cuda", torch.bfloat16, "fp8_rows"): "saccade.nn.formats.torch_products",
        ("pack_linear", "cuda", torch.bfloat16, "int4"): "saccade.nn.formats.torch_products",
        ("pack_linear", "cuda", torch.bfloat16, "nvfp4"): "saccade.nn.formats.flashinfer_nvfp4",
        **{
            ("pack_linear", "cpu", dtype, kind): module
            for kind, module in (
                ("int8", "saccade.nn.formats.onednn_int8"),
                ("w8a16", "saccade.nn.formats.cpu_int8"),
                ("int4", "saccade.nn.formats.cpu_int4"),
            )
            for dtype in (torch.float32, torch.bfloat16)
        },
        **{
            ("pack_experts", "cpu", dtype, kind): "saccade.nn.formats.cpu_experts"
            for kind in ("int4", "int8", "w8a16")
            for dtype in (torch.float32, torch.bfloat16)
        },
        ("pack_experts", "cuda", torch.bfloat16, "fp8_blocks"): "saccade.nn.formats.flashinfer_fp8",
        ("pack_experts", "cuda", torch.bfloat16, "int4"): "saccade.nn.formats.flashinfer_int4",
        ("pack_experts", "cuda", torch.bfloat16, "nvfp4"): "saccade.nn.formats.flashinfer_nvfp4",
    }
)
"""Kernels for quantised weights, by function, device type, dtype and kind of format; imported if a model has one."""


def resolve(
    device_type: str, dtype: torch.dtype, faster: Mapping[tuple[str, str, torch.dtype], str] = FASTER
) -> Operations:
    """Return the operations for a device type and dtype. Those whose module cannot be imported stay plain."""
    operations = {}
    for (operation, *place), module in faster.items():
        if place == [device_type, dtype]:
            try:
                with attempt():
                    fast = getattr(importlib.import_module(module), operation)
            except Unavailable as error:
                logger.warning("an operation is slower than it could be", operation=operation, reason=error.reason)
            else:
                operations[operation] = _or_plain(fast, getattr(PLAIN, operation))
    kernels = {
        (function, kind): module
        for (function, *place, kind), module in KERNELS.items()
        if place == [device_type, dtype]
    }
    return replace(PLAIN, **operations, kernels=kernels)


def _or_plain(fast: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        result = fast(*arguments)
        return plain(*arguments) if result is None else result

    return call
