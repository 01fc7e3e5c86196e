"""Tells which kernel a product with FP8 blocks needs on Hopper. DeepGEMM compiles each one with nvcc at its first use.

A kernel belongs to one shape of weights, and has its own tile, stages and multicast. The number of tokens decides which
kernel computes a product. Source of the rules: FlashInfer's copy of DeepGEMM, release 0.7.2, in
csrc/nv_internal/tensorrt_llm: get_best_gemm_config in deep_gemm/jit_utils.cuh; gemm_dispatch and grouped_gemm_dispatch
in kernels/cutlass_kernels/fp8_blockscale_gemm/fp8_blockscale_gemm_kernel.cuh. tests/real runs that source.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

BLOCK = 128
"""Inputs of a tile, and of a scale."""

SHARED_BYTES = 232448
"""The shared memory of a block on Hopper."""

TILE_COLUMNS = range(16, 129, 8)
SMALL_TILE, TILE = 64, 128
"""Rows of a tile, for at most 64 rows and for more."""

LEAST_STAGES = 4
MULTICAST_ROWS = 1024
"""From this number of tokens on, two blocks share a load."""

SWAPPED, SWAPPED_BY_H20, H20_SMS = 32, 64, 78
"""Below this number of tokens, weights are the rows of the product. For experts, a GPU of 78 multiprocessors differs.
"""


class Weights(NamedTuple):
    """A matrix [outputs, inputs], or the matrices of a mixture of *num_experts* experts."""

    outputs: int
    inputs: int
    num_experts: int = 0


class DeepGemmKernel(NamedTuple):
    """A kernel that is compiled once. Its tiles have *rows* of weights if it *is_swapped*, otherwise of tokens."""

    weights: Weights
    is_swapped: bool
    rows: int
    columns: int
    num_stages: int
    num_multicast: int


def kernel_of(weights: Weights, num_tokens: int, num_sms: int) -> DeepGemmKernel:
    """Return the kernel for *num_tokens*, at least 1, on a GPU of *num_sms* multiprocessors.

    For experts, *num_tokens* are those of the step, whatever experts they choose.
    """
    is_swapped = num_tokens < _first_plain(weights, num_sms)
    height, width = (weights.outputs, num_tokens) if is_swapped else (num_tokens, weights.outputs)
    num_groups = max(1, weights.num_experts)
    rows = SMALL_TILE if height <= SMALL_TILE else TILE

    def cost(columns: int) -> tuple[int, int, int]:
        """Return a key to sort by: fewer waves of tiles first, then a fuller last wave, then a narrower tile."""
        num_tiles = -(-height // rows) * -(-width // columns) * num_groups
        return -(-num_tiles // num_sms), -((num_tiles - 1) % num_sms), columns

    columns = min(TILE_COLUMNS, key=cost)
    most_stages = 6 if TILE % columns else 8
    stages = range(most_stages, LEAST_STAGES - 1, -1)
    shared = (_shared_bytes(rows, columns, weights.inputs, one, is_swapped) for one in stages)
    num_stages = next((one for one, size in zip(stages, shared, strict=True) if size <= SHARED_BYTES), 0)
    shares = not is_swapped and num_tokens >= MULTICAST_ROWS and width % (2 * columns) == num_sms % 2 == 0
    return DeepGemmKernel(weights, is_swapped, rows, columns, num_stages, 2 if shares and num_groups == 1 else 1)


def kernels_of(weights: Weights, most_tokens: int, num_sms: int) -> Mapping[Hashable, int]:
    """Return each DeepGemmKernel for 1 to *most_tokens* tokens, with the least number of tokens that needs it."""
    kernels: dict[Hashable, int] = {}
    for num_tokens in _borders(_first_plain(weights, num_sms), most_tokens):
        kernels.setdefault(kernel_of(weights, num_tokens, num_sms), num_tokens)
    return kernels


def _first_plain(weights: Weights, num_sms: int) -> int:
    """Return the least number of tokens with which tokens, not weights, are the rows of the product."""
    return SWAPPED_BY_H20 if weights.num_experts and num_sms == H20_SMS else SWAPPED


def _borders(first_plain: int, most_tokens: int) -> Iterator[int]:
    """Yield, ascending, the numbers of tokens at which the number of tiles, or a limit, can change."""
    borders = {*range(1, first_plain + 1), SMALL_TILE + 1, *range(TILE + 1, most_tokens + 1, TILE), MULTICAST_ROWS}
    yield from sorted(border for border in borders if border <= most_tokens)


def _shared_bytes(rows: int, columns: int, inputs: int, num_stages: int, is_swapped: bool) -> int:
    """Return a block's shared memory in bytes: two for each result, one for each value of a tile, four for a scale."""
    num_scales = -(-inputs // BLOCK)
    if is_swapped:
        of_tokens, of_weights = _rounded(4 * columns, 128), 4 * num_scales
    else:
        of_tokens, of_weights = 4 * rows, 4 * num_scales * (2 if BLOCK % columns else 1)
    stage = (rows + columns) * BLOCK + of_tokens + 2 * 8
    return 2 * rows * columns + num_stages * stage + _rounded(of_weights, 8)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
