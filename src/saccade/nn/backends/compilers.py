"""The compilers that kernels need at their first use, and the sentences about a missing one and about the wait."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

TOOLKIT = Path("/usr/local/cuda")
"""FlashInfer's last resort if neither a variable nor the search path leads to nvcc."""


def no_c_compiler() -> str | None:
    """Return why Triton cannot build the launchers of its kernels; None if it can."""
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return None
    return "it needs a C compiler at its first use, and finds none: install gcc, or name one in the variable CC"


def no_cuda_compiler() -> str | None:
    """Return why FlashInfer cannot compile its kernels; None if it can, or has them compiled."""
    if find_spec("flashinfer_jit_cache") is not None:
        return None
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), str(TOOLKIT)]
    has_nvcc = shutil.which("nvcc") or any(Path(folder, "bin", "nvcc").exists() for folder in folders if folder)
    tools = [name for name, path in (("nvcc", has_nvcc), ("ninja", shutil.which("ninja"))) if not path]
    if not tools:
        return None
    return (
        f"it compiles its kernels at their first use, and finds no {' and no '.join(tools)}: install the CUDA "
        "toolkit and ninja, or FlashInfer's package of compiled kernels, flashinfer-jit-cache"
    )


def compilation() -> str | None:
    """Return what FlashInfer's first use costs on this machine; None if it has its kernels compiled."""
    folder = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home(), ".cache", "flashinfer")
    if find_spec("flashinfer_jit_cache") is not None or any(folder.glob("*/*/cached_ops/*")):
        return None
    return (
        "FlashInfer compiles kernels now, as it does at their first use: others report half a minute for each size of "
        f"heads and number format. Later starts find them in {folder}"
    )
