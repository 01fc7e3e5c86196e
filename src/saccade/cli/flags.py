"""The flags, one frozen dataclass per group. A flag that means the same as one of `vllm serve` has its name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from saccade.config import MIB, Count, Seconds, Size, Switch
from saccade.engine.config import EngineConfig
from saccade.gateway.config import MediaSettings, ServerSettings
from saccade.gateway.tenants.api_keys import MAX_BYTES, flag_keys, read_keys_file
from saccade.watched_file import WatchedFile

ENGINE = EngineConfig(model_dir="", model="")
SECRET = ("--api-key", "--admin-key")
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Names = Annotated[tuple[str, ...], Parameter(negative="", show_default=False, consume_multiple=True)]


@Parameter(name="*", group=Group("Engine", sort_key=2))
@dataclass(frozen=True)
class EngineFlags:
    """Model, limits, memory and device of the engine."""

    served_model_name: Names = ()
    "The model's names in the API; answers have the first. By default a hub id as given, or a folder's last part."
    max_model_len: Count | None = ENGINE.max_model_len
    "Tokens of prompt and answer together; by default the model's own limit."
    max_num_seqs: Count = ENGINE.max_num_seqs
    "Sequences that run at a time."
    max_num_batched_tokens: Count = ENGINE.max_num_batched_tokens
    "Tokens computed in one step; longer prompts are computed in chunks."
    max_num_waiting: Count = ENGINE.max_num_waiting
    "Sequences that wait to run; more get 429."
    gpu_memory_utilization: float = ENGINE.gpu_memory_utilization
    "Part of the GPU's memory to use."
    kv_cache_memory_bytes: Count | None = ENGINE.kv_cache_bytes
    "Size of the KV cache; by default the device's free memory, on a CPU 1 GiB at most."
    block_size: Count = ENGINE.block_size
    "Tokens in a block of the KV cache."
    encoder_cache_bytes: Size = ENGINE.encoder_cache_bytes
    "Size of the cache of encoded images."
    state_snapshot_bytes: Size = ENGINE.state_snapshot_bytes
    "Size of the snapshots from which prompts that begin alike resume, for a model with recurrent layers."
    state_snapshot_blocks: Count = ENGINE.state_snapshot_blocks
    "Blocks of the KV cache between two such snapshots; one more is taken at the end of each prompt."
    encode_budget_patches: Count | None = ENGINE.encode_budget_patches
    "Patches that the vision encoder processes in one step; by default 1024 on a CPU, 16384 on a GPU."
    enable_prefix_caching: bool = ENGINE.enable_prefix_caching
    "Reuse the KV cache of prompts that begin alike."
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    "The network's number format; auto is the checkpoint's own, but float32 on a CPU without bfloat16."
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    "Number format of the KV cache; auto is the network's, fp8 is e4m3 with the checkpoint's scales, else 1."
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "Where the network runs; auto takes a GPU if there is one."
    attention_backend: Literal["auto", "torch_sdpa", "triton", "flashinfer"] = "auto"
    "What computes the language model's attention; the summary of the start says why auto took what."
    mm_encoder_attn_backend: Annotated[
        Literal["auto", "torch_sdpa", "triton", "flashinfer_cudnn", "torch_varlen", "amx"],
        Parameter(alias="--mm-attention-backend"),
    ] = "auto"
    "What computes the vision encoder's attention; auto is amx in bfloat16 on a CPU that has AMX, with saccade[cpu]."
    cuda_graphs: bool = ENGINE.cuda_graphs
    "Repeat decode steps as CUDA graphs; needs a GPU and --attention-backend triton. Never run on a GPU yet."
    mm_encoder_cuda_graph: bool = ENGINE.mm_encoder_cuda_graph
    "Repeat the vision encoder as CUDA graphs; the summary of the start says why not. Never run on a GPU yet."
    threads: Count | None = ENGINE.threads
    "CPU threads of the network, in each process; by default OMP_NUM_THREADS, else one less than there are cores."
    tensor_parallel_size: Annotated[Count, Parameter(alias="-tp")] = ENGINE.tensor_parallel_size
    "Processes that compute the model together, each with its part of the weights on a GPU of its own."
    attention_tensor_parallel_size: Annotated[Count | None, Parameter(alias="--attn-tp-size")] = None
    "How many of these processes share the attention and the KV cache, by default all; the others hold copies."
    mm_encoder_tp_mode: Literal["data", "weights"] = "data"
    "How these processes share the vision encoder: data gives each whole images, weights cuts its matrices."
    engine_silence: Seconds = 300.0
    "Seconds that one step may take before the engine counts as hung and is replaced."
    trust_remote_code: Switch = False
    "Accepted and ignored: code that ships with a model is never run."
    record_steps: Path | None = None
    "A folder to record steps in, for `saccade replay`. They hold prompts and answers."
    record_steps_bytes: Annotated[int, Parameter(validator=Number(gte=MIB))] = ENGINE.record_steps_bytes
    "Bytes of recorded steps to keep; the oldest are deleted."
    record_pixels: Switch = ENGINE.record_pixels
    "Record images' pixels too; without them, steps that encode an image cannot be replayed."


def served_names(model: str, folder: Path, flags: EngineFlags) -> tuple[str, ...]:
    """Return the model's names in the API, without duplicates: the flag's, else that of default_name()."""
    return tuple(dict.fromkeys(flags.served_model_name)) or (default_name(model, folder),)


def default_name(model: str, folder: Path) -> str:
    """Return a model's default name: a hub id as given, else the folder's last part."""
    return folder.name if Path(model).expanduser().is_dir() else model


def engine_config(model: str, folder: Path, flags: EngineFlags) -> EngineConfig:
    """Return the settings of an engine. Raises StartupError for settings that cannot work."""
    name, *aliases = served_names(model, folder, flags)
    config = EngineConfig(
        model_dir=str(folder),
        model=name,
        aliases=tuple(aliases),
        device=flags.device,
        dtype=flags.dtype,
        kv_cache_dtype=flags.kv_cache_dtype,
        max_model_len=flags.max_model_len,
        max_num_seqs=flags.max_num_seqs,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_num_waiting=flags.max_num_waiting,
        block_size=flags.block_size,
        kv_cache_bytes=flags.kv_cache_memory_bytes,
        encoder_cache_bytes=flags.encoder_cache_bytes,
        state_snapshot_bytes=flags.state_snapshot_bytes,
        state_snapshot_blocks=flags.state_snapshot_blocks,
        encode_budget_patches=flags.encode_budget_patches,
        gpu_memory_utilization=flags.gpu_memory_utilization,
        attention_backend=flags.attention_backend,
        mm_encoder_attn_backend=flags.mm_encoder_attn_backend,
        cuda_graphs=flags.cuda_graphs,
        mm_encoder_cuda_graph=flags.mm_encoder_cuda_graph,
        threads=flags.threads,
        tensor_parallel_size=flags.tensor_parallel_size,
        attention_tensor_parallel_size=flags.attention_tensor_parallel_size,
        mm_encoder_tp_mode=flags.mm_encoder_tp_mode,
        enable_prefix_caching=flags.enable_prefix_caching,
        record_steps=None if flags.record_steps is None else str(flags.record_steps.expanduser().absolute()),
        record_steps_bytes=flags.record_steps_bytes,
        record_pixels=flags.record_pixels,
    )
    config.check()
    return config


def check_keys_file(server: ServerSettings) -> None:
    """Raise StartupError if --api-keys-file is wrong, before anything is started."""
    if server.api_keys_file is not None:
        read_keys_file(WatchedFile(server.api_keys_file, MAX_BYTES), flag_keys(server.api_keys, server.admin_keys))


SERVER = ServerSettings()
MEDIA = MediaSettings()
ENGINE_FLAGS = EngineFlags()
"""Every flag at its default."""
