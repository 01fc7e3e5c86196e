"""The rules of saccade.nn.formats.deep_gemm_keys are those of FlashInfer's copy of DeepGEMM.

The function that chooses a tile is plain C++; it is taken out of the source and run. Of the rest, the text is compared.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from libraries import Library

from saccade.nn.formats.deep_gemm_keys import Weights, kernel_of

pytestmark = pytest.mark.real
CSRC = Path("flashinfer", "data", "csrc")
DEEP_GEMM = CSRC / "nv_internal" / "tensorrt_llm" / "deep_gemm"
PRODUCTS = DEEP_GEMM.parent / "kernels" / "cutlass_kernels" / "fp8_blockscale_gemm"
EXPERTS = CSRC / "fused_moe" / "cutlass_backend" / "cutlass_fused_moe_kernels.cuh"
FIRST, LAST = "inline int div_up(", "}  // namespace deep_gemm::jit"

PROGRAM = """
#include <climits>
#include <cstdint>
#include <iostream>
#include <tuple>
#include <vector>
using GemmConfig = std::tuple<int, int, int, int, int>;
%s
int main() {
  unsigned height, width, inputs;
  int groups, sms, swapped;
  while (std::cin >> height >> width >> inputs >> groups >> sms >> swapped) {
    auto [rows, columns, stages, multicast, shared] =
        get_best_gemm_config(height, width, inputs, groups, sms, false, swapped);
    std::cout << rows << ' ' << columns << ' ' << stages << ' ' << multicast << '\\n';
  }
}
"""

WEIGHTS = [
    *(Weights(*shape) for shape in [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (2304, 4096)]),
    *(Weights(*shape) for shape in [(64, 128), (1024, 65536), (152064, 2048), (10240, 5120)]),
    *(Weights(*shape) for shape in [(1536, 2048, 128), (2048, 768, 128), (768, 2048, 64), (2048, 384, 1)]),
]
SMS = [132, 114, 78, 60]


def text_of(library: Library, path: Path) -> str:
    return " ".join((library.root / path).read_text().split())


@pytest.fixture
def choose(flashinfer: Library, tmp_path: Path) -> Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]]:
    """The library's function, for many products at a time."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = (flashinfer.root / DEEP_GEMM / "jit_utils.cuh").read_text()
    functions = source[source.index(FIRST) : source.rindex(LAST)]
    (tmp_path / "choose.cpp").write_text(PROGRAM % functions)
    command = [compiler, "-std=c++17", "-O1", "-o", str(tmp_path / "choose"), str(tmp_path / "choose.cpp")]
    subprocess.run(command, check=True)

    def run(products: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        lines = "\n".join(" ".join(map(str, product)) for product in products)
        done = subprocess.run([str(tmp_path / "choose")], input=lines, capture_output=True, text=True, check=True)
        return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]

    return run


@pytest.mark.parametrize("num_sms", SMS)
def test_kernels(num_sms: int, choose: Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]]) -> None:
    """The function's arguments are those of its two callers, whose text the next test compares."""
    tokens = [*range(1, 300), *range(300, 9000, 97), *(border + one for border in (512, 1024, 4096) for one in (0, 1))]
    kernels = [kernel_of(weights, count, num_sms) for weights in WEIGHTS for count in tokens]
    products = []
    for weights in WEIGHTS:
        first_plain = 64 if weights.num_experts and num_sms == 78 else 32
        for count in tokens:
            sides = (weights.outputs, count) if count < first_plain else (count, weights.outputs)
            products.append((*sides, weights.inputs, weights.num_experts or 1, num_sms, count < first_plain))
    chosen = choose([tuple(map(int, product)) for product in products])
    assert chosen == [(one.rows, one.columns, one.num_stages, one.num_multicast) for one in kernels]
    assert [one.is_swapped for one in kernels] == [bool(product[-1]) for product in products]


def test_callers(flashinfer: Library) -> None:
    """Below a number of tokens, weights and tokens are exchanged; of experts, the tokens of the step count."""
    source = text_of(flashinfer, PRODUCTS / "fp8_blockscale_gemm_kernel.cuh")
    plain, grouped = (
        re.search(rf"void {name}\(.*?(?=\bvoid )", source)[0]  # type: ignore[index]
        for name in ("gemm_dispatch", "grouped_gemm_dispatch")
    )
    assert "m_threshold = 32; if (shape_m >= m_threshold) {" in plain
    assert "get_best_gemm_config(shape_m, shape_n, shape_k, num_problems, num_device_sms);" in plain
    assert "get_best_gemm_config(shape_n, shape_m, shape_k, num_problems, num_device_sms, false, true);" in plain
    assert "num_problems = 1;" in plain
    assert "num_device_sms == 78 ? 64 : 32;" in grouped
    assert "if (expected_m >= m_per_expert_threshold) {" in grouped
    assert "get_best_gemm_config(expected_m, shape_n, shape_k, num_problems, num_device_sms);" in grouped
    assert "get_best_gemm_config(shape_n, expected_m, shape_k, num_problems, num_device_sms, false, true);" in grouped
    assert "expected_m_ = shape_m; return getWorkspaceSizeBase(" in text_of(
        flashinfer, PRODUCTS / "fp8_blockscale_gemm.cu"
    )
    experts = text_of(flashinfer, EXPERTS)
    for sides in ("factor * inter_size, hidden_size", "hidden_size, inter_size"):
        assert f"->getWorkspaceSize( num_rows, {sides}, experts_per_token, num_experts_per_node);" in experts


def test_a_kernel_is_known_by_these_numbers(flashinfer: Library) -> None:
    """A compiled kernel is looked up by a name of these parts, and no other; *block_k* is 128."""
    source = text_of(flashinfer, DEEP_GEMM / "compiler.cuh")
    name = re.search(r"std::string name = (.*?);", source)[1]  # type: ignore[index]
    parts = {"swapAB", "shape_n", "shape_k", "block_m", "block_n", "block_k", "num_groups", "num_stages"}
    words = {*re.findall(r"to_string\((\w+)\)", name), *re.findall(r"string\((\w+) \?", name)}
    assert words == {*parts, "num_tma_multicast", "gemm_type"}
