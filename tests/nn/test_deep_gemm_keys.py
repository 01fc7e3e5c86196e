"""The kernels that DeepGEMM compiles. tests/real compares the rules with the library's source."""

import pytest

from saccade.nn.formats.deep_gemm_keys import Weights, kernel_of, kernels_of

QWEN3_VL_8B = [Weights(6144, 4096), Weights(4096, 4096), Weights(24576, 4096), Weights(4096, 12288)]
EXPERTS = [Weights(1536, 2048, 128), Weights(2048, 768, 128), Weights(2048, 768, 1)]
H100, H20 = 132, 78


def test_kernels_of_a_release() -> None:
    """Its products of 1 to 8192 tokens need 40 kernels on an H100, and a step of any length one of them."""
    assert sum(len(kernels_of(weights, 8192, H100)) for weights in QWEN3_VL_8B) == 40


@pytest.mark.parametrize("num_sms", [H100, H20, 114])
@pytest.mark.parametrize("weights", [*QWEN3_VL_8B, *EXPERTS])
def test_no_number_of_tokens_needs_another_kernel(weights: Weights, num_sms: int) -> None:
    kernels = kernels_of(weights, 2500, num_sms)
    met: dict[object, int] = {}
    for num_tokens in range(1, 2501):
        met.setdefault(kernel_of(weights, num_tokens, num_sms), num_tokens)
    assert kernels == met


def test_few_tokens_need_few_kernels() -> None:
    (one,) = kernels_of(QWEN3_VL_8B[0], 1, H100).items()
    assert one == (kernel_of(QWEN3_VL_8B[0], 1, H100), 1)
    assert max(kernels_of(QWEN3_VL_8B[0], 100, H100).values()) <= 100
