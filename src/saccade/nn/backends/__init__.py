"""Attention backends, chosen by name; choosing one imports no other."""

import importlib
from types import MappingProxyType

from saccade.errors import StartupError
from saccade.nn.context import AttentionBackend

BACKENDS = MappingProxyType({"torch_sdpa": "saccade.nn.backends.torch_sdpa"})
"""Module of each backend; it holds a class named Backend."""


def load_backend(name: str) -> AttentionBackend:
    """Return a new backend. Raises StartupError for an unknown name, with those that exist."""
    if name not in BACKENDS:
        raise StartupError(f"There is no attention backend {name!r}. Known: {', '.join(sorted(BACKENDS))}.")
    backend: AttentionBackend = importlib.import_module(BACKENDS[name]).Backend()
    return backend
