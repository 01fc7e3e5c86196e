"""Backends, chosen by name; choosing one imports no other."""

import importlib
from types import MappingProxyType

import torch

from saccade.errors import StartupError
from saccade.nn.context import Backend

AUTO, PLAIN, KERNELS = "auto", "torch_sdpa", "numba"
BACKENDS = MappingProxyType({PLAIN: "saccade.nn.backends.torch_sdpa", KERNELS: "saccade.nn.backends.numba_cpu"})
"""Module of each backend; it holds a class named Backend."""


def load_backend(name: str, num_threads: int = 1) -> Backend:
    """Return a new backend for steps of up to *num_threads*. Raises StartupError for an unknown name."""
    if name not in BACKENDS:
        raise StartupError(f"There is no attention backend {name!r}. Known: {', '.join((AUTO, *sorted(BACKENDS)))}.")
    backend: Backend = importlib.import_module(BACKENDS[name]).Backend(num_threads)
    return backend


def choose_backend(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Return the backend that *name* means here. Raises StartupError for one that cannot compute this."""
    fits = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and head_dim % 4 == 0
    if name == AUTO:
        return KERNELS if fits else PLAIN
    if name == KERNELS and not fits:
        raise StartupError(
            f"attention_backend {KERNELS} computes on a CPU in bfloat16 or float32, with heads of a multiple of four "
            f"channels, not on {device.type} in {str(dtype).removeprefix('torch.')} with heads of {head_dim}."
        )
    return name
