"""Attention backends by name, one registry for decoders and one for vision towers. Only the chosen one is imported."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

from saccade.errors import StartupError
from saccade.nn.context import AttentionBackend, VisionAttentionBackend

AUTO, PLAIN, AMX = "auto", "torch_sdpa", "amx"
BACKENDS: Mapping[str, str] = MappingProxyType({PLAIN: "saccade.nn.backends.torch_sdpa"})
"""Module of each backend for decoders; it has a class AttentionBackend."""

VISION_BACKENDS: Mapping[str, str] = MappingProxyType(
    {PLAIN: "saccade.nn.backends.torch_sdpa", AMX: "saccade.nn.amx.backend"}
)
"""Module of each backend for vision towers, the slowest first.

It has a class VisionAttentionBackend and a function `unavailable(device, dtype)` that returns why the backend cannot
compute there, or None. A module whose import fails is not installed.
"""


def load_backend(name: str) -> AttentionBackend:
    """Return a new backend for decoders. Raises StartupError for an unknown name."""
    chosen = PLAIN if name == AUTO else name
    if chosen not in BACKENDS:
        raise StartupError(f"attention_backend must be one of {', '.join((AUTO, *BACKENDS))}, not {name!r}.")
    backend: AttentionBackend = importlib.import_module(BACKENDS[chosen]).AttentionBackend()
    return backend


def load_vision_backend(name: str, device: torch.device, dtype: torch.dtype) -> VisionAttentionBackend:
    """Return a new backend for vision towers; auto is the fastest that can compute on *device* in *dtype*.

    Raises StartupError for an unknown name, and for a backend that cannot compute there.
    """
    if name not in (AUTO, *VISION_BACKENDS):
        raise StartupError(
            f"mm_encoder_attn_backend must be one of {', '.join((AUTO, *VISION_BACKENDS))}, not {name!r}."
        )
    for candidate in reversed(list(VISION_BACKENDS)) if name == AUTO else [name]:
        try:
            module = importlib.import_module(VISION_BACKENDS[candidate])
            reason = module.unavailable(device, dtype)
        except ImportError as error:
            reason = f"it is not installed ({error}); `pip install 'saccade[cpu]'` installs it"
        if reason is None:
            backend: VisionAttentionBackend = module.VisionAttentionBackend()
            return backend
    raise StartupError(f"mm_encoder_attn_backend cannot be {name}: {reason}.")
