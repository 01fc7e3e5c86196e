"""FlashInfer's products with quantised weights as they are published, played on a CPU: what they demand and compute.

Source: flashinfer/gemm/gemm_base.py, quantization/fp4_quantization.py and fused_moe/core.py of release 0.7.2, and
their documents; tests/real reads the signatures itself. A call that the library would refuse fails an assertion.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from published import empty_library, has_form
from references.formats import E2M1
from torch.nn import functional

from saccade.nn.backends.compilers import Toolkit

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BLOCK, GROUP = 128, 16


def of_blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values in e4m3 times the scales [.., rows / 128, columns / 128]."""
    whole = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return values.float() * whole[..., : values.shape[-2], : values.shape[-1]]


def of_tokens(x: torch.Tensor) -> torch.Tensor:
    """Activations rounded to e4m3 in groups of 128, as kernels that take bfloat16 do."""
    groups = x.float().unflatten(1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
    return ((groups / scales).to(E4M3).float() * scales).flatten(1)


def fp8_blockscale_gemm_sm90(input: torch.Tensor, weight: torch.Tensor, *, weight_scale: torch.Tensor) -> torch.Tensor:
    (num_tokens, columns), rows = input.shape, len(weight)
    assert columns % BLOCK == rows % 64 == 0
    has_form(input, (num_tokens, columns), BF16)
    has_form(weight, (rows, columns), E4M3)
    has_form(weight_scale, (-(-rows // BLOCK), columns // BLOCK), torch.float32)
    return (of_tokens(input) @ of_blocks(weight, weight_scale).t()).to(BF16)


def gemm_fp8_nt_groupwise(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
    *, scale_major_mode: str, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    (num_tokens, columns), rows = a.shape, len(b)
    assert scale_major_mode == "K"
    assert num_tokens % 4 == columns % BLOCK == 0
    has_form(a, (num_tokens, columns), E4M3)
    has_form(b, (rows, columns), E4M3)
    has_form(a_scale, (num_tokens, columns // BLOCK), torch.float32)
    has_form(b_scale, (-(-rows // BLOCK), columns // BLOCK), torch.float32)
    x = a.float() * a_scale.repeat_interleave(BLOCK, 1)
    return (x @ of_blocks(b, b_scale).t()).to(out_dtype)


def from_tiles(scales: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """The e4m3 scales [.., rows, groups] of tiles with 128 rows and 4 groups: row r is line r % 32, part r // 32."""
    padded = scales.contiguous().view(*scales.shape[:-2], scales.shape[-2] // 128, -1, 32, 4, 4)
    plain = padded.movedim((-4, -3, -2), (-2, -3, -4)).reshape(scales.shape)
    return plain[..., :rows, :groups].view(E4M3).float()


def of_nvfp4(codes: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """Values of four bits, two a byte, times the scales of their groups."""
    table = torch.from_numpy(E2M1)
    values = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1).flatten(-2)
    rows, columns = values.shape[-2:]
    return values * from_tiles(tiles, rows, columns // GROUP).repeat_interleave(GROUP, -1)


def nvfp4_quantize(a: torch.Tensor, a_global_sf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert a_global_sf.numel() == 1
    has_form(a, tuple(a.shape), BF16)
    groups = a.float().unflatten(1, (-1, GROUP)) * a_global_sf
    scales = (groups.abs().amax(-1) / 6).clamp_max(448).to(E4M3)
    distances = (groups / scales.float().clamp_min(1e-9).unsqueeze(-1)).unsqueeze(-1) - torch.from_numpy(E2M1)
    codes = distances.abs().argmin(-1).flatten(1).to(torch.uint8)
    rows, count = scales.shape
    padded = functional.pad(scales.view(torch.uint8), (0, -count % 4, 0, -rows % 128))
    tiles = padded.view(len(padded) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4).reshape(padded.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, tiles


def mm_fp4(
    a: torch.Tensor, b: torch.Tensor, a_descale: torch.Tensor, b_descale: torch.Tensor, alpha: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    weight, (num_tokens, width) = b.t(), a.shape
    has_form(a, (num_tokens, width), torch.uint8)
    has_form(weight, (len(weight), width), torch.uint8)
    assert len(weight) % 32 == width % GROUP == 0
    assert alpha.dtype == torch.float32
    assert alpha.numel() == 1
    x, w = of_nvfp4(a, a_descale), of_nvfp4(weight, b_descale.t())
    return (x @ w.t() * alpha).to(out_dtype)


def mixed(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up_gate: torch.Tensor, down: torch.Tensor, first: int
) -> torch.Tensor:
    """The experts from *first* on; their first matrix has the ups first."""
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    total = torch.zeros(len(x), down.shape[1])
    for expert in range(len(down)):
        share = (weights * (ids == first + expert)).sum(1, keepdim=True)
        up, gate = (x.float() @ up_gate[expert].t()).chunk(2, 1)
        total += share * ((functional.silu(gate) * up) @ down[expert].t())
    return total.to(BF16)


def cutlass_fused_moe(
    input: torch.Tensor, token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor,
    fc1_expert_weights: torch.Tensor, fc2_expert_weights: torch.Tensor, output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor], *, ep_size: int, ep_rank: int, use_fused_finalize: bool,
    use_deepseek_fp8_block_scale: bool = False,
) -> list[torch.Tensor]:  # fmt: skip
    assert output_dtype == input.dtype == BF16
    assert not use_fused_finalize  # its sums differ from run to run
    assert 0 <= ep_rank < ep_size
    own = token_selected_experts, token_final_scales
    first = ep_rank * len(fc2_expert_weights)
    if use_deepseek_fp8_block_scale:
        up_gate, down = (
            of_blocks(matrix, scales)
            for matrix, scales in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)
        )
        return [mixed(of_tokens(input), *own, up_gate, down, first)]
    input_1, tiles_1, factor_1, input_2, tiles_2, factor_2 = quant_scales
    matrices = []
    for matrix, tiles, to_fp4, factor in (
        (fc1_expert_weights, tiles_1, input_1, factor_1), (fc2_expert_weights, tiles_2, input_2, factor_2)
    ):  # fmt: skip
        assert (matrix.dtype, tiles.dtype) == (torch.int64, torch.int32)
        assert to_fp4.numel() == 1
        has_form(factor, (len(matrix),), torch.float32)
        values = of_nvfp4(matrix.view(torch.uint8), tiles.view(torch.uint8))
        matrices.append(values * (factor * to_fp4).view(-1, 1, 1))
    return [mixed(input, *own, *matrices, first)]


def trtllm_fp8_block_scale_routed_moe(
    topk_ids: tuple[torch.Tensor, torch.Tensor], routing_bias: None, hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor, gemm1_weights: torch.Tensor, gemm1_weights_scale: torch.Tensor,
    gemm2_weights: torch.Tensor, gemm2_weights_scale: torch.Tensor, num_experts: int, top_k: int, n_group: None,
    topk_group: None, intermediate_size: int, local_expert_offset: int, local_num_experts: int,
    routed_scaling_factor: None,
) -> torch.Tensor:  # fmt: skip
    num_tokens, columns = hidden_states.shape
    has_form(hidden_states, (num_tokens, columns), E4M3)
    has_form(hidden_states_scale, (columns // BLOCK, num_tokens), torch.float32)
    assert gemm2_weights.shape == (local_num_experts, columns, intermediate_size)
    assert topk_ids[0].shape == (num_tokens, top_k)
    assert local_expert_offset + local_num_experts <= num_experts
    x = hidden_states.float() * hidden_states_scale.t().repeat_interleave(BLOCK, 1)
    matrices = of_blocks(gemm1_weights, gemm1_weights_scale), of_blocks(gemm2_weights, gemm2_weights_scale)
    return mixed(x, *topk_ids, *matrices, local_expert_offset)


def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """An order of each 32 rows, as the library's own is: not this one."""
    assert epilogue_tile_m == 128
    return input_tensor.unflatten(0, (-1, 8, 4)).transpose(1, 2).flatten(0, 2)


def reorder_rows_for_gated_act_gemm(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(x.chunk(2), 1).flatten(0, 1)


def convert_to_block_layout(input_tensor: torch.Tensor, blockK: int) -> torch.Tensor:
    return input_tensor.unflatten(1, (-1, blockK)).transpose(0, 1).contiguous()


def block_scale_interleave(unswizzled_sf: torch.Tensor) -> torch.Tensor:
    rows, groups = unswizzled_sf.shape
    assert unswizzled_sf.dtype == BF16
    assert rows % 128 == groups % 4 == 0
    return unswizzled_sf.view(rows // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4).flatten()


def of_int4(blocks: torch.Tensor, scales: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """The values [O, I] of one expert, from the kernel's order."""
    codes = blocks.transpose(0, 1).flatten(1)
    low, high = (((codes >> shift & 15).int() ^ 8) - 8 for shift in (0, 4))
    values = torch.stack((low, high), -1).flatten(1).float()
    plain = scales.view(len(scales) // 128, -1, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(scales.shape)
    values = values * plain.float().repeat_interleave(32, 1)
    rows = values.unflatten(0, (-1, 4, 8)).transpose(1, 2).flatten(0, 2)
    return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if is_gated else rows


def trtllm_mxint4_block_scale_routed_moe(
    topk_ids: torch.Tensor, hidden_states: torch.Tensor, gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor, gemm1_alpha: None, gemm1_beta: None, gemm1_clamp_limit: None,
    gemm2_weights: torch.Tensor, gemm2_weights_scale: torch.Tensor, num_experts: int, top_k: int, n_group: None,
    topk_group: None, intermediate_size: int, local_expert_offset: int, local_num_experts: int,
    routed_scaling_factor: None,
) -> list[torch.Tensor]:  # fmt: skip
    num_tokens, hidden = hidden_states.shape
    has_form(topk_ids, (num_tokens, top_k), torch.int32)
    has_form(hidden_states, (num_tokens, hidden), BF16)
    has_form(gemm1_weights, (local_num_experts, hidden // 256, 2 * intermediate_size, 128), torch.uint8)
    has_form(gemm1_weights_scale, (local_num_experts, 2 * intermediate_size, hidden // 32), BF16)
    has_form(gemm2_weights, (local_num_experts, intermediate_size // 256, hidden, 128), torch.uint8)
    has_form(gemm2_weights_scale, (local_num_experts, hidden, intermediate_size // 32), BF16)
    assert local_expert_offset + local_num_experts <= num_experts
    weights = (topk_ids & 0xFFFF).to(torch.int16).view(BF16).float()
    pairs = (gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale)
    up_gate, down = (
        torch.stack([of_int4(*expert, is_gated=is_gated) for expert in zip(*pair, strict=True)])
        for pair, is_gated in zip(pairs, (True, False), strict=True)
    )
    return [mixed(hidden_states, topk_ids >> 16, weights, up_gate, down, local_expert_offset)]


MODULES = {
    "flashinfer": (mm_fp4, nvfp4_quantize, block_scale_interleave, shuffle_matrix_a),
    "flashinfer.gemm": (fp8_blockscale_gemm_sm90, gemm_fp8_nt_groupwise),
    "flashinfer.fused_moe": (
        cutlass_fused_moe,
        trtllm_fp8_block_scale_routed_moe,
        trtllm_mxint4_block_scale_routed_moe,
        convert_to_block_layout,
        reorder_rows_for_gated_act_gemm,
    ),
}


def convert_weight_to_int4pack(pairs: torch.Tensor, tiles: int) -> torch.Tensor:
    """The codes as PyTorch's kernel for CPUs takes them; the one for GPUs takes two columns a byte, the first above."""
    assert pairs.dtype == torch.uint8
    assert tiles in (2, 4, 8)
    assert len(pairs) % 8 == pairs.shape[1] * 2 % (tiles * 16) == 0
    codes = torch.stack((pairs >> 4, pairs & 15), -1).flatten(1).int()
    return torch._convert_weight_to_int4pack_for_cpu(codes, tiles)


def install(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], nvcc: Path | None = Path("/opt/cuda/bin/nvcc")
) -> None:
    """Make these functions importable, and have torch find a GPU of *capability*; *nvcc* is the machine's."""
    monkeypatch.setattr("saccade.nn.backends.compilers.find_toolkit", lambda: Toolkit(nvcc, None, None, {}))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch._convert_weight_to_int4pack", convert_weight_to_int4pack)
    monkeypatch.setattr("torch._weight_int4pack_mm", torch._weight_int4pack_mm_for_cpu)
    for name, functions in MODULES.items():
        library: Any = empty_library(name)
        for function in functions:
            setattr(library, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, library)
    for name in ("flashinfer_fp8", "flashinfer_int4", "flashinfer_nvfp4"):
        # Set before it is deleted, so that the module is forgotten at the end.
        monkeypatch.setitem(sys.modules, f"saccade.nn.formats.{name}", ModuleType(name))
        del sys.modules[f"saccade.nn.formats.{name}"]
