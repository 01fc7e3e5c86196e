"""What the benchmark found on the machine: card, driver, torch and the libraries that kernels come from."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.measured import commit, machine

LIBRARIES = (
    "triton",
    "flashinfer-python",
    "flashinfer-jit-cache",
    "flashinfer-cubin",
    "nvidia-cudnn-frontend",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "deep-gemm",
    "flash-attn",
    "flash-attn-3",
)


def findings() -> dict[str, str]:
    """Return names and values; missing libraries are "none". It starts no CUDA context."""
    return {
        "commit": commit() or "unknown",
        "host": machine(),
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "cards": "; ".join(_cards()) or "none",
        "compilers": ", ".join(name for name in ("nvcc", "ninja", "gcc") if shutil.which(name)) or "none",
        **{name: _version(name) for name in LIBRARIES},
    }


def _cards() -> Iterator[str]:
    """Yield name, driver, memory and compute capability of each card."""
    if shutil.which("nvidia-smi") is None:
        return
    fields = "--query-gpu=name,driver_version,memory.total,compute_cap"
    listed = subprocess.run(
        ["nvidia-smi", fields, "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    yield from filter(None, (line.strip() for line in listed.stdout.splitlines()))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"
