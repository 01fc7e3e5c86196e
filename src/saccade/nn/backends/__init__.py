"""Attention backends by name: a registry for decoders, and one for vision towers. A backend is imported when needed."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from saccade.errors import StartupError
from saccade.nn.backends.workload import Workload, not_half_on_gpu, not_in_bfloat16_on_cpu, not_on_amx
from saccade.nn.context import AttentionBackend, VisionAttentionBackend
from saccade.nn.libraries import Unavailable, attempt

__all__ = ["AUTO", "BACKENDS", "PLAIN", "VISION_BACKENDS", "Workload", "load_backend", "load_vision_backend", "why"]

AUTO, PLAIN, AMX = "auto", "torch_sdpa", "amx"
PLAIN_WORKLOAD = Workload()


def _fit(_: Workload) -> None:
    """Return None: only the module itself knows what it cannot compute."""


class Backend(NamedTuple):
    """A backend, which *module* implements. If it has a *device_type*, auto imports it only on such a device.

    *install* is the command that installs what the module imports. *unfit* returns why the backend could not compute a
    Workload even then, or None; it needs no import. *not_by_auto* is why auto never takes the backend, "" if it may.
    """

    module: str
    device_type: str | None = None
    install: str = ""
    unfit: Callable[[Workload], str | None] = _fit
    not_by_auto: str = ""


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        PLAIN: Backend("saccade.nn.backends.torch_sdpa"),
        "onednn": Backend("saccade.nn.backends.onednn_attention", "cpu"),
        "triton": Backend("saccade.nn.backends.triton_attention", "cuda", "pip install triton"),
        "flashinfer": Backend(
            "saccade.nn.backends.flashinfer_paged", "cuda", "pip install 'saccade-vlm[gpu]'", unfit=not_half_on_gpu
        ),
    }
)
"""Backends for decoders; auto tries the last first. The module has a class AttentionBackend. Its static method
`unavailable(workload)` returns why it cannot compute a Workload, or None. If the import of a module fails with
ImportError, the backend is not installed.
"""

VISION_BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        PLAIN: Backend("saccade.nn.backends.torch_sdpa"),
        "onednn": Backend("saccade.nn.backends.onednn_attention", "cpu"),
        "triton": Backend("saccade.nn.backends.triton_attention", "cuda", "pip install triton"),
        "flashinfer_cudnn": Backend(
            "saccade.nn.backends.flashinfer_cudnn",
            "cuda",
            "pip install 'saccade-vlm[gpu]' nvidia-cudnn-frontend",
            unfit=not_half_on_gpu,
        ),
        "torch_varlen": Backend("saccade.nn.backends.torch_varlen", "cuda"),
        "openvino": Backend(
            "saccade.nn.backends.openvino_attention",
            "cpu",
            "pip install 'saccade-vlm[openvino]'",
            unfit=not_in_bfloat16_on_cpu,
            not_by_auto="it rounds scores to bfloat16, so it is faster and less exact",
        ),
        AMX: Backend("saccade.nn.amx.backend", "cpu", "pip install 'saccade-vlm[cpu]'", unfit=not_on_amx),
    }
)
"""Backends for vision towers, in the same order. The module has a class VisionAttentionBackend, as above."""


def load_backend(name: str, workload: Workload = PLAIN_WORKLOAD) -> AttentionBackend:
    """Return a new backend for decoders; auto picks the first that can compute *workload*.

    Raises StartupError for an unknown name, and for a backend that cannot compute it.
    """
    backend: AttentionBackend = _load("--attention-backend", name, BACKENDS, "AttentionBackend", workload)
    return backend


def load_vision_backend(name: str, workload: Workload = PLAIN_WORKLOAD) -> VisionAttentionBackend:
    """Return a new backend for vision towers; auto picks the first that can compute *workload*.

    Raises StartupError for an unknown name, and for a backend that cannot compute it.
    """
    backend: VisionAttentionBackend = _load(
        "--mm-encoder-attn-backend", name, VISION_BACKENDS, "VisionAttentionBackend", workload
    )
    return backend


def why(requested: str, backend: AttentionBackend | VisionAttentionBackend, workload: Workload) -> str:
    """Return why *backend* was loaded for the name *requested*, for the summary at startup.

    It does not mention backends for other devices.
    """
    if requested != AUTO:
        return "as asked"
    entries = BACKENDS if hasattr(backend, "paged") else VISION_BACKENDS
    preferred = list(entries)[list(entries).index(backend.name) + 1 :]
    here = [name for name in preferred if entries[name].device_type == workload.device.type]
    never = {name: entries[name].not_by_auto for name in here if entries[name].not_by_auto}
    reasons = never | _reasons(entries, type(backend).__name__, workload, reversed(here))
    choice = f"auto for {str(workload.dtype).removeprefix('torch.')} on {workload.device.type}"
    return "; ".join([choice, *(f"not {name}: {reason}" for name, reason in reasons.items())])


def _load(flag: str, requested: str, entries: Mapping[str, Backend], class_name: str, workload: Workload) -> Any:
    if requested != AUTO and requested not in entries:
        names = ", ".join((AUTO, *entries))
        raise StartupError(f"{flag} must be one of {names}, not {requested!r}. {_here(entries, class_name, workload)}")
    for name in reversed(list(entries)) if requested == AUTO else [requested]:
        is_other_device = entries[name].device_type not in (None, workload.device.type)
        if requested == AUTO and (is_other_device or entries[name].not_by_auto):
            continue
        reason = _reason(name, entries[name], class_name, workload)
        if reason is None:
            return getattr(importlib.import_module(entries[name].module), class_name)()
    raise StartupError(f"{flag} cannot be {requested}: {reason}. {_here(entries, class_name, workload)}")


def _here(entries: Mapping[str, Backend], class_name: str, workload: Workload) -> str:
    """Return in words which backends can compute *workload*, and why the others cannot."""
    reasons = _reasons(entries, class_name, workload, entries)
    can = ", ".join(name for name in entries if name not in reasons)
    return " ".join([f"Here {can} can compute.", *(f"Not {name}: {reason}." for name, reason in reasons.items())])


def _reasons(
    entries: Mapping[str, Backend], class_name: str, workload: Workload, names: Iterable[str]
) -> dict[str, str]:
    """Return why backends among *names* cannot compute *workload*, by name. Those that can are left out."""
    reasons = {}
    for name in names:
        device_type = entries[name].device_type
        if device_type not in (None, workload.device.type):
            reasons[name] = f"it computes on {'a GPU' if device_type == 'cuda' else 'a CPU'}"
        elif (reason := _reason(name, entries[name], class_name, workload)) is not None:
            reasons[name] = reason
    return reasons


def _reason(name: str, entry: Backend, class_name: str, workload: Workload) -> str | None:
    if name in workload.failed:
        return workload.failed[name]
    if (reason := entry.unfit(workload)) is not None:
        return reason
    try:
        with attempt():
            module = importlib.import_module(entry.module)
    except Unavailable as error:
        install = f"; `{entry.install}` installs it" if isinstance(error.__cause__, ImportError) else ""
        return f"{error.reason}{install}"
    backend = getattr(module, class_name)
    if workload.is_captured and name != PLAIN and not backend.captures_decodes:
        return "its decodes cannot be captured, which --cuda-graphs needs"
    unavailable: str | None = backend.unavailable(workload)
    return unavailable
