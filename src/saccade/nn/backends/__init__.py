"""Backends, chosen by name; choosing one imports no other."""

import importlib
from types import MappingProxyType

import torch

from saccade.errors import StartupError
from saccade.nn.context import Backend

AUTO, PLAIN, KERNELS, TILES = "auto", "torch_sdpa", "numba", "amx"
BACKENDS = MappingProxyType(
    {
        PLAIN: "saccade.nn.backends.torch_sdpa",
        KERNELS: "saccade.nn.backends.numba_cpu",
        TILES: "saccade.nn.backends.amx",
    }
)
"""Module of each backend; it holds a class named Backend."""


def load_backend(name: str, num_threads: int = 1) -> Backend:
    """Return a new backend for steps of up to *num_threads*. Raises StartupError for an unknown name."""
    if name not in BACKENDS:
        raise StartupError(f"There is no attention backend {name!r}. Known: {', '.join((AUTO, *sorted(BACKENDS)))}.")
    backend: Backend = importlib.import_module(BACKENDS[name]).Backend(num_threads)
    return backend


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the backend that *name* means here. Raises StartupError for one that cannot compute this."""
    kernels = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and head_dim % 4 == 0
    if name == AUTO:
        if not kernels:
            return PLAIN
        return TILES if dtype == torch.bfloat16 and _tiles_available() else KERNELS
    given = f"not on {device.type} in {str(dtype).removeprefix('torch.')} with heads of {head_dim}"
    if name in (KERNELS, TILES) and not kernels:
        raise StartupError(
            f"attention_backend {name} computes on a CPU in bfloat16 or float32, with heads of a multiple of four "
            f"channels, {given}."
        )
    if name == TILES and not (dtype == torch.bfloat16 and _tiles_available()):
        raise StartupError(f"attention_backend {name} computes in bfloat16 on a CPU with AMX and AVX-512, {given}.")
    return name


def _tiles_available() -> bool:
    # Numba takes a moment to import, and only a CPU needs it.
    return bool(importlib.import_module("saccade.nn.kernels.tiles").available())
