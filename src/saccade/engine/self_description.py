"""Describes an engine: its model, limits and machine."""

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

import torch
from blake3 import blake3

from saccade.engine.config import EngineConfig
from saccade.engine.executor import kv_copies
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.engine.executor.execution import Execution
from saccade.engine.executor.fingerprint import has_bundled_weights
from saccade.engine.executor.loader import LoadedModel
from saccade.engine.executor.memory import block_format, limits
from saccade.engine.executor.step_bytes import step_bytes
from saccade.engine.recording import Machine
from saccade.models.bundled_model import ABILITIES, WAY_ON
from saccade.models.spec import has_states, window_of
from saccade.protocol.description import Description
from saccade.protocol.kv_transfer import KvForm
from saccade.protocol.model_files import CONFIG
from saccade.release import DISTRIBUTION, installed_version
from saccade.transport.shared_memory import readers

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"triton": "triton", "flashinfer": "flashinfer-python", "flashinfer_cudnn": "flashinfer-python"}
)
"""The package of each attention backend that does not compute with torch."""

RANDOM_WEIGHTS = "The weights are random (--load-format dummy), so answers mean nothing."


def describe(
    config: EngineConfig, model: LoadedModel, execution: Execution, max_model_len: int, sizes: CacheSizes
) -> Description:
    """Return the description of an engine that serves *model* with caches of *sizes*."""
    return Description(
        model=config.model,
        aliases=config.aliases,
        fingerprint=model.fingerprint,
        weights=model.weights_digest,
        files=model.files,
        max_model_len=max_model_len,
        max_num_seqs=limits(config, model).max_num_seqs,
        block_size=config.block_size,
        num_blocks=sizes.num_blocks,
        num_state_checkpoints=sizes.num_checkpoints,
        dtype=str(model.network.dtype).removeprefix("torch."),
        kv_cache_dtype=str(block_format(config, model).dtype).removeprefix("torch."),
        device=_device(model),
        shm_namespace=readers(),
        version=installed_version(),
        attention_backend=execution.backend.name,
        mm_encoder_attn_backend=execution.vision_backend.name if model.network.spec.takes_media else "",
        backend_reasons=execution.reasons,
        takes_resets=True,
        role=config.role,
        resumes_at_states=has_states(model.network.spec.kv_specs),
        enable_prefix_caching=config.enable_prefix_caching,
        gpu_memory_utilization=config.gpu_memory_utilization if model.network.device.type == "cuda" else None,
        window=window_of(model.network.spec.kv_specs) or 0,
        num_window_blocks=sizes.num_window_blocks,
        note=_note(config),
        weight_formats="; ".join(filter(None, (model.weight_formats, execution.of_weights))),
        rounding_saves=model.rounding_saves,
        step_bytes=step_bytes(model.module) if model.network.device.type == "cpu" and model.ranks.size == 1 else 0,
    )


def kv_form(description: Description, caches: Caches) -> KvForm:
    """Return the format in which the engine with *description* keeps KV state in *caches*."""
    return KvForm(
        fingerprint=description.fingerprint,
        dtype=description.dtype,
        kv_cache_dtype=description.kv_cache_dtype,
        block_size=description.block_size,
        block_nbytes=kv_copies.block_nbytes(caches),
        state_nbytes=kv_copies.state_nbytes(caches),
        window_nbytes=kv_copies.window_nbytes(caches),
    )


def describe_machine(description: Description, num_threads: int) -> Machine:
    """Return this machine's properties that affect the last bits of results, for an engine with *description*."""
    backends = (description.attention_backend, description.mm_encoder_attn_backend)
    packages = (DISTRIBUTION, "torch", "numba", *(PACKAGES[name] for name in backends if name in PACKAGES))
    return Machine(
        weights=description.fingerprint,
        model_config=blake3(description.files.files[CONFIG]).digest(),
        backend=", ".join(filter(None, backends)),
        device=description.device,
        dtype=description.dtype,
        num_threads=num_threads,
        processor=_processor(description.device),
        versions={name: version for name in packages if (version := _version(name))},
    )


def _note(config: EngineConfig) -> str:
    """Return what users must know about the answers, or "" if there is nothing."""
    if config.load_format == "dummy":
        return RANDOM_WEIGHTS
    return f"{ABILITIES} {WAY_ON}" if has_bundled_weights(config) else ""


def _device(model: LoadedModel) -> str:
    """Return the device that *model* is on, and the number of processes if several compute on one each."""
    device, size = model.network.device, model.ranks.size
    return str(device) if size == 1 else f"{device.type} x {size}"


def _processor(device: str) -> str:
    """Return the name of the device and, for a CPU, the instruction set that torch uses."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.is_file() else []
    return f"{(*names, platform.machine())[0]}, {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str:
    """Return the version of *package*; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
