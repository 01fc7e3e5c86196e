"""The folders in which libraries keep the kernels that they compile, so that later starts find them.

Source of the paths: flashinfer/jit/env.py and cute_dsl_core.py, and deep_gemm/compiler.cuh in its csrc, release 0.7.2;
triton/knobs.py, release 3.7.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class KernelCache(NamedTuple):
    """The cache *folder* of a library, which the environment variable *variable* can move.

    *patterns* find the kernels of each kind; each kernel is one file.
    """

    folder: Path
    variable: str
    patterns: Mapping[str, str]

    def counts(self) -> dict[str, int]:
        """Return how many kernels of each kind there are."""
        return {name: sum(1 for _ in self.folder.glob(pattern)) for name, pattern in self.patterns.items()}

    def num_bytes(self) -> int:
        """Return the total size of the folder's files in bytes."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def flashinfer_folder() -> Path:
    """Return FlashInfer's folder. It has a folder for each release, with one for each kind of GPU in it."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home(), ".cache", "flashinfer")


def kernel_caches() -> tuple[KernelCache, ...]:
    """Return all libraries' folders, wherever the environment puts them. They need not exist."""
    deep_gemm = os.environ.get("TRTLLM_DG_CACHE_DIR") or Path.home() / ".tensorrt_llm"
    triton_home = os.environ.get("TRITON_HOME") or Path.home()
    triton = os.environ.get("TRITON_CACHE_DIR") or Path(triton_home, ".triton", "cache")
    of_flashinfer = {
        "modules of FlashInfer": "*/*/cached_ops/*/*.so",
        "kernels of FlashInfer in CuTe DSL": "*/*/cached_ops/*_cute_dsl/*.o",
    }
    return (
        KernelCache(flashinfer_folder(), "FLASHINFER_WORKSPACE_BASE", of_flashinfer),
        KernelCache(Path(deep_gemm), "TRTLLM_DG_CACHE_DIR", {"products of DeepGEMM": "cache/*/nvcc_kernel.cubin"}),
        KernelCache(Path(triton), "TRITON_CACHE_DIR", {"kernels of Triton": "*/*.cubin"}),
    )
