"""The compilers that kernels need at their first use, and messages about a missing compiler and about the wait."""

import os
import shutil
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from saccade.nn.backends.kernel_caches import flashinfer_folder

TOOLKIT = Path("/usr/local/cuda")
"""FlashInfer's last resort if neither a variable nor the search path leads to nvcc."""

FA3_HEADER, GEMM_HEADER = "curand_kernel.h", "cublasLt.h"
"""What the sources of FA3 and of products in FP8 blocks include.

A toolkit of nvcc and CUDA's runtime alone lacks them; torch's packages of CUDA's libraries have them.
"""

REMEDIES = MappingProxyType(
    {
        "nvcc": "the CUDA toolkit",
        "ninja": "ninja",
        FA3_HEADER: "cuRAND's headers (nvidia-curand)",
        GEMM_HEADER: "cuBLAS's headers (nvidia-cublas)",
    }
)


class Build(NamedTuple):
    """A *module* of FlashInfer, called *words* in messages. A core takes about *seconds* for each of *num_sources*."""

    module: str
    words: str
    num_sources: int
    seconds: int


EXPERTS = Build("fused_moe_90", "mixtures of experts for Hopper", 248, 60)
"""Counted and timed with nvcc 13.0, without a GPU."""


@dataclass(frozen=True)
class Toolkit:
    """The tools that FlashInfer and DeepGEMM compile with; None for a tool that was not found.

    *home* is the folder whose `bin` has *nvcc*, or None if nvcc lies elsewhere on the search path. *headers* has the
    folder of each header.
    """

    nvcc: Path | None
    home: Path | None
    ninja: Path | None
    headers: Mapping[str, Path | None]

    def absent(self, *headers: str) -> list[str]:
        """Return those of nvcc, ninja and *headers* that were not found."""
        places = {"nvcc": self.nvcc, "ninja": self.ninja, **{name: self.headers[name] for name in headers}}
        return [name for name, path in places.items() if path is None]


def find_toolkit() -> Toolkit:
    """Look for nvcc, in FlashInfer's order, for ninja, and for headers, which torch's packages may also have."""
    nvcc, ninja = shutil.which("nvcc"), shutil.which("ninja")
    candidates = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parents[1])
    homes = [Path(folder) for folder in candidates if folder] + [TOOLKIT]
    home = next((folder for folder in homes if (folder / "bin" / "nvcc").exists()), None)
    folders = [*([home / "include"] if home else []), *_folders_of_packages()]
    headers = {
        name: next((folder for folder in folders if (folder / name).exists()), None)
        for name in (FA3_HEADER, GEMM_HEADER)
    }
    compiler = home / "bin" / "nvcc" if home else Path(nvcc) if nvcc else None
    return Toolkit(compiler, home, Path(ninja) if ninja else None, headers)


def _folders_of_packages() -> Iterator[Path]:
    """Yield the header folders in torch's packages of CUDA libraries."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        yield from sorted(Path(folder).glob("*/include"))


def use_toolkit(toolkit: Toolkit, environment: MutableMapping[str, str]) -> None:
    """Let FlashInfer and DeepGEMM find *toolkit* through *environment*; settings that are already there stay.

    DeepGEMM looks for nvcc in CUDA_HOME and in PATH alone.
    """
    if toolkit.home is not None:
        environment.setdefault("CUDA_HOME", str(toolkit.home))
    folders = [folder for folder in environment.get("CPLUS_INCLUDE_PATH", "").split(os.pathsep) if folder]
    for folder in toolkit.headers.values():
        is_known = folder is None or str(folder) in folders
        if not is_known and (toolkit.home is None or folder != toolkit.home / "include"):
            folders.append(str(folder))
    if folders:
        environment["CPLUS_INCLUDE_PATH"] = os.pathsep.join(folders)


def no_c_compiler() -> str | None:
    """Return why Triton cannot build the launchers of its kernels; None if it can."""
    if os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return None
    return "it needs a C compiler at its first use, and finds none: install gcc, or name one in the variable CC"


def no_cuda_compiler(*headers: str) -> str | None:
    """Return why FlashInfer cannot compile kernels that include *headers*; None if it can, or has compiled ones."""
    if _is_brought() or not (names := find_toolkit().absent(*headers)):
        return None
    return (
        f"it compiles its kernels at their first use, and finds no {' and no '.join(names)}: install "
        f"{' and '.join(REMEDIES[name] for name in names)}, or FlashInfer's package of compiled kernels, "
        "flashinfer-jit-cache"
    )


def compilation() -> str | None:
    """Return a notice of what FlashInfer's first use costs on this machine; None if it has compiled kernels."""
    folder = flashinfer_folder()
    if _is_brought() or any(folder.glob("*/*/cached_ops/*")):
        return None
    return (
        "FlashInfer compiles kernels now, as it does at their first use: others report half a minute for each size of "
        f"heads and number format. Later starts find them in {folder}"
    )


def build_of(build: Build) -> str | None:
    """Return a notice of what *build* costs on this machine, which is about to compile it; None if it already has."""
    folder = flashinfer_folder()
    if _is_brought(build.module) or any(folder.glob(f"*/*/cached_ops/{build.module}/*.so")):
        return None
    num_cores = os.cpu_count() or 1
    minutes = -(-build.num_sources * build.seconds // (60 * num_cores))
    return (
        f"FlashInfer compiles {build.words} now, {build.num_sources} sources of about {build.seconds} seconds each: "
        f"about {minutes} minutes on {num_cores} cores. Later starts find them in {folder}"
    )


def objects() -> tuple[int, int]:
    """Return how many objects FlashInfer's current build has compiled, and how many it needs; (0, 0) if none runs."""
    plans = sorted(flashinfer_folder().glob("*/*/cached_ops/*/build.ninja"), key=lambda plan: plan.stat().st_mtime)
    if not plans or any(plans[-1].parent.glob("*.so")):
        return 0, 0
    lines = plans[-1].read_text(errors="replace").splitlines()
    named = [line.split()[1].rstrip(":") for line in lines if line.startswith("build ") and ".o:" in line]
    return sum((plans[-1].parent / Path(one).name).exists() for one in named), len(named)


def _is_brought(module: str = "*") -> bool:
    """Return whether *module*, or any module, comes with FlashInfer already compiled, so that it needs no compiler.

    It is among FlashInfer's own files, or the package of compiled kernels is installed.
    """
    spec = find_spec("flashinfer")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    in_own_files = any(any(Path(folder, "data", "aot").glob(f"{module}/*.so")) for folder in folders)
    return in_own_files or find_spec("flashinfer_jit_cache") is not None
