"""Products with FP8 weights in blocks of 128 x 128 on a GPU by FlashInfer, and mixtures of experts with such weights.

On Hopper, its kernel rounds the activations itself, in groups of 128; on Blackwell, Saccade does. Source of the
arguments: flashinfer/gemm/gemm_base.py and flashinfer/fused_moe/core.py, release 0.7.2. It has never run on a GPU;
tests/real checks its calls against the releases' own signatures. Shapes: N tokens, I inputs, O outputs, E experts, K
experts of a token.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import structlog
import torch
from flashinfer.fused_moe import cutlass_fused_moe, trtllm_fp8_block_scale_routed_moe
from flashinfer.gemm import fp8_blockscale_gemm_sm90, gemm_fp8_nt_groupwise
from torch.nn import functional

from saccade.nn.backends.compilers import EXPERTS, build_of, find_toolkit
from saccade.nn.formats.deep_gemm_keys import Weights, kernels_of
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.products import (
    Product,
    aligned,
    capability,
    field_of,
    num_multiprocessors,
    rounded_to_fp8,
)
from saccade.nn.formats.quantised import QuantisedExperts, QuantisedLinear, QuantisedWeight
from saccade.nn.libraries import Unavailable
from saccade.nn.ops import ExpertShare, PackedExperts

BLOCK, ROWS = 128, 64
"""The side of a block; the number of outputs is a multiple of 64."""

HOPPER, BLACKWELL, SMALL_BLACKWELL = 9, 10, 12
"""Major numbers of compute capabilities: H100 and H200, B200 and B300, and GPUs for workstations."""

TOKENS = 4
"""The number of tokens of a product on Blackwell is a multiple of 4."""

logger = structlog.get_logger(__name__)


@dataclass(frozen=True)
class BlockFp8(Product):
    """A linear layer in FP8 blocks: *weight_OI* is e4m3, with float32 *scales* [O / 128, I / 128]."""

    weight_OI: torch.Tensor
    scales: torch.Tensor
    bias_O: torch.Tensor | None
    is_hopper: bool

    def product(self, x_NI: torch.Tensor) -> torch.Tensor:
        """Return x W^T [N, O]."""
        if self.is_hopper:
            return fp8_blockscale_gemm_sm90(x_NI, self.weight_OI, weight_scale=self.scales)  # type: ignore[no-any-return]
        values, scales_NG = rounded_to_fp8(functional.pad(x_NI, (0, 0, 0, -len(x_NI) % TOKENS)), BLOCK)
        output_NO: torch.Tensor = gemm_fp8_nt_groupwise(
            values, self.weight_OI, scales_NG, self.scales, scale_major_mode="K", out_dtype=x_NI.dtype
        )
        return output_NO[: len(x_NI)]

    def kernels(self, most_tokens: int) -> Mapping[Hashable, int]:
        """See PackedLinear.kernels. The result is empty on Blackwell: the first product compiles every kernel."""
        if not self.is_hopper:
            return {}
        return kernels_of(Weights(*self.weight_OI.shape), most_tokens, num_multiprocessors(self.weight_OI))


@dataclass(frozen=True)
class BlockFp8Experts(PackedExperts):
    """Experts in FP8 blocks: *up_gate* [E, 2I, H] has the ups first; *down* is [E, H, I]. Both have scales."""

    up_gate: torch.Tensor
    up_gate_scales: torch.Tensor
    down: torch.Tensor
    down_scales: torch.Tensor
    share: ExpertShare
    is_hopper: bool

    def apply(self, x_NE: torch.Tensor, expert_ids_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of this rank's experts, [N, H]."""
        ids = expert_ids_NK.int()
        if self.is_hopper:
            outputs = cutlass_fused_moe(
                x_NE,
                ids,
                weights_NK.float(),
                self.up_gate,
                self.down,
                x_NE.dtype,
                [self.up_gate_scales, self.down_scales],
                ep_size=self.share.num_ranks,
                ep_rank=self.share.rank,
                use_deepseek_fp8_block_scale=True,
                use_fused_finalize=False,
            )
        else:
            values, scales_NG = rounded_to_fp8(x_NE, BLOCK)
            outputs = trtllm_fp8_block_scale_routed_moe(
                (ids, weights_NK.float()),
                None,
                values,
                scales_NG.t().contiguous(),
                self.up_gate,
                self.up_gate_scales,
                self.down,
                self.down_scales,
                self.share.num_experts,
                ids.shape[1],
                None,
                None,
                self.down.shape[2],
                self.share.rank * len(self.down),
                len(self.down),
                None,
            )
        # Releases before 0.8 return a tensor, later ones a list.
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    def kernels(self, most_tokens: int) -> Mapping[Hashable, int]:
        """See PackedExperts.kernels. On Hopper, the result has DeepGEMM's for both matrices; elsewhere it is empty."""
        if not self.is_hopper:
            return {}
        num_sms = num_multiprocessors(self.down)
        kernels: dict[Hashable, int] = {}
        for num_experts, outputs, inputs in (self.up_gate.shape, self.down.shape):
            kernels.update(kernels_of(Weights(outputs, inputs, num_experts), most_tokens, num_sms))
        return kernels


def pack_linear(layer: QuantisedLinear) -> BlockFp8:
    """Return the product for *layer*. Raises Unavailable."""
    weight_OI, scales = _joined(aligned(layer.parts, BLOCK, BLOCK))
    major = _major(weight_OI, (HOPPER, BLACKWELL, SMALL_BLACKWELL))
    if len(weight_OI) % ROWS:
        raise Unavailable(f"its outputs are no multiple of {ROWS}")
    return BlockFp8(weight_OI, scales, layer.bias_O, major == HOPPER)


def pack_experts(gate_up: QuantisedExperts, down: QuantisedExperts, share: ExpertShare) -> BlockFp8Experts:
    """Return the mixture of experts. Raises Unavailable."""
    up_gate, up_gate_scales = _joined(aligned(gate_up.parts[::-1], BLOCK, BLOCK))
    own_down, down_scales = _joined(aligned(down.parts, BLOCK, BLOCK))
    major = _major(own_down, (HOPPER, BLACKWELL))
    if own_down.shape[1] % BLOCK or up_gate.shape[1] % (2 * BLOCK):
        raise Unavailable(f"its sides are no multiples of {BLOCK}")
    if major == HOPPER and (notice := build_of(EXPERTS)) is not None:
        logger.warning(notice)
    return BlockFp8Experts(up_gate, up_gate_scales, own_down, down_scales, share, major == HOPPER)


def _major(tensor: torch.Tensor, majors: tuple[int, ...]) -> int:
    major, minor = capability(tensor)
    if major not in majors:
        names = ", ".join(f"{one}.x" for one in majors)
        raise Unavailable(f"FlashInfer has FP8 blocks for compute capabilities {names}, not {major}.{minor}")
    if major == HOPPER and find_toolkit().nvcc is None:
        # DeepGEMM compiles a kernel for each shape, and no package brings them. It ends the process if it cannot.
        raise Unavailable("nvcc compiles its kernels, and is not found: install the CUDA toolkit")
    return major


def _joined(weights: list[QuantisedWeight]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and the float32 scales of *weights*, one below the other. Raises Unavailable."""
    first = weights[0].format
    if not isinstance(first, Fp8) or first.cell != (BLOCK, BLOCK):
        raise Unavailable(f"its blocks are not {BLOCK} x {BLOCK}")
    return field_of(weights, "weight"), field_of(weights, first.scale).float().contiguous()
