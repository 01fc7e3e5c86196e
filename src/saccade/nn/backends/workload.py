"""The workload of an attention backend, and checks of it that several backends share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from saccade.nn.cpu import multiplies_bfloat16

CPU = torch.device("cpu")
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Workload:
    """The attention of a loaded network.

    *cache_dtype* is the dtype of cached keys and values, None for *dtype*. *head_sizes* are the pairs (width of a key,
    width of a value) of all heads; empty if they are not known. With *is_captured*, only the plain backend may lack
    decodes that can be captured in CUDA graphs. With *looks_ahead*, tokens of an image see later ones. *is_cache_read*
    is set if a kernel of the chosen backend reads the cache in place. *failed* has the reasons against backends whose
    trial failed, by name.
    """

    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    head_sizes: frozenset[tuple[int, int]] = frozenset()
    has_latent_layers: bool = False
    is_captured: bool = False
    looks_ahead: bool = False
    is_cache_read: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)


def cost_of_cache(workload: Workload) -> str | None:
    """Return in words what the cache's number format costs if no kernel reads it; None if it costs nothing."""
    if workload.is_cache_read or workload.cache_dtype in (None, workload.dtype):
        return None
    return (
        f"no kernel reads a KV cache in {_name(workload.cache_dtype)}: every step copies the whole context of every "
        "sequence, and converts it through float32, so decodes of long contexts are many times slower than with "
        "--kv-cache-dtype auto"
    )


def not_on_gpu(workload: Workload) -> str | None:
    """Return the reason against a backend that computes only on GPUs; None if there is a GPU."""
    if workload.device.type != "cuda":
        return f"it computes on a GPU, not on a {workload.device.type}"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def not_half_on_gpu(workload: Workload) -> str | None:
    """Return the reason against a backend that computes only on GPUs, and only in half precision."""
    return not_on_gpu(workload) or _not_computing_in(workload, HALF)


def has_amx() -> bool:
    """Return whether this process may use AMX. Linux enables its registers only for a process that requests them."""
    return torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def not_on_amx(workload: Workload) -> str | None:
    """Return the reason against a backend that computes only in bfloat16 on a CPU with AMX."""
    device, dtype = workload.device.type, _name(workload.dtype)
    if device != "cpu" or workload.dtype != torch.bfloat16:
        return f"it computes in bfloat16 on a CPU, not in {dtype} on {device}"
    return None if has_amx() else "this processor has no AMX, or the system does not enable it"


def not_in_bfloat16_on_cpu(workload: Workload) -> str | None:
    """Return the reason against a backend that computes only on CPUs that multiply bfloat16."""
    if (reason := _not_on_cpu(workload) or _not_computing_in(workload, (torch.bfloat16,))) is not None:
        return reason
    return None if multiplies_bfloat16() else "this processor has no instructions for bfloat16"


def not_faster_by_onednn(workload: Workload) -> str | None:
    """Return the reason against attention by oneDNN, which is faster than PyTorch's own where MKL is slow.

    That is on processors with AVX512 that Intel did not make.
    """
    if (reason := _not_on_cpu(workload)) is not None:
        return reason
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    processor = torch.cpu.get_capabilities()
    if not processor.get("avx512_f") or str(processor.get("cpu_name", "Intel")).startswith("Intel"):
        return "it is not faster on this processor"
    return None


def not_in(workload: Workload, dtypes: Sequence[torch.dtype], caches: Sequence[torch.dtype] = ()) -> str | None:
    """Return the reason against a backend for *dtypes* that reads only caches in the queries' dtype or in *caches*."""
    reason = _not_computing_in(workload, dtypes)
    if reason is None and workload.cache_dtype not in (None, workload.dtype, *caches):
        return f"it reads no KV cache in {_name(workload.cache_dtype)}"
    return reason


def _not_on_cpu(workload: Workload) -> str | None:
    return None if workload.device.type == "cpu" else f"it computes on a CPU, not on a {workload.device.type}"


def _not_computing_in(workload: Workload, dtypes: Sequence[torch.dtype]) -> str | None:
    if workload.dtype in dtypes:
        return None
    return f"it computes in {' and '.join(map(_name, dtypes))}, not in {_name(workload.dtype)}"


def not_for_latents(workload: Workload) -> str | None:
    """Return the reason against a backend without a method `latent`."""
    return "it has no attention over latents, which layers of this model need" if workload.has_latent_layers else None


def not_for_sizes(workload: Workload, multiple: int, most: int) -> str | None:
    """Return the reason against a backend for heads of up to *most* channels, in multiples of *multiple*."""
    others = sorted({size for pair in workload.head_sizes for size in pair if size % multiple or size > most})
    if not others:
        return None
    return f"its heads have a multiple of {multiple} channels, at most {most}, not {', '.join(map(str, others))}"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
