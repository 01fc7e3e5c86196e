"""An engine's settings, each with its flag, default and help text."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from saccade.config import GIB, MIB, Count, JsonObject, NotNegative, Seconds, Size, Switch
from saccade.engine.speculative_config import SpeculativeConfig
from saccade.errors import StartupError
from saccade.protocol.description import Role
from saccade.whole_numbers import read_port

Names = Annotated[tuple[str, ...], Parameter(negative="", show_default=False, consume_multiple=True)]
KvCacheDtype = Literal["auto", "fp8"]


class Limits(NamedTuple):
    """A step's limits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    encode_budget_patches: int


ON_CPU, ON_GPU = Limits(64, 2048, 1024), Limits(256, 8192, 16384)


def _absolute(_: Any, tokens: list[Token]) -> str:
    return str(Path(tokens[0].value).expanduser().absolute())


@Parameter(name="*", group=Group("Engine", sort_key=2))
@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Model, limits, memory and device of the engine."""

    served_model_name: Names = ()
    "The model's names in the API; answers have the first. By default a hub id as given, or a folder's last part."
    max_model_len: Count | None = None
    "Tokens of prompt and answer together; by default the model's own limit."
    model_impl: str = "auto"
    "Code of the network: saccade, transformers, or auto, which is saccade for architectures that it knows."
    hf_overrides: JsonObject | None = None
    "Values that replace those of the model's config.json, as JSON; objects are merged."
    generation_config: Literal["auto", "vllm"] = "auto"
    "auto takes defaults of sampling from the model's generation_config.json, vllm only its end-of-sequence ids."
    override_generation_config: JsonObject | None = None
    "Values that replace those of the model's generation_config.json, as JSON, such as a temperature."
    max_num_seqs: Count | None = None
    "Sequences that run at a time; by default 64 on a CPU or with recurrent layers, 256 on a GPU."
    max_num_batched_tokens: Count | None = None
    "Tokens computed in one step, else in chunks; by default 2048 on a CPU, 8192 on a GPU."
    max_num_waiting: Count = 1024
    "Sequences that wait to run; more get 429."
    gpu_memory_utilization: Annotated[float, Parameter(validator=Number(gt=0, lte=1))] = 0.9
    "Part of the GPU's memory to use."
    kv_cache_bytes: Annotated[Count | None, Parameter(name="--kv-cache-memory-bytes")] = None
    "Size of the KV cache; by default the device's free memory, on a CPU 1 GiB at most."
    block_size: Count = 16
    "Tokens in a block of the KV cache."
    encoder_cache_bytes: Size = GIB
    "Size of the cache of encoded images."
    state_snapshot_bytes: Size | None = None
    "Size of the state checkpoints at which prompts resume, with recurrent layers; by default 1 GiB, more on a GPU."
    state_snapshot_blocks: Count = 64
    "Blocks of the KV cache between two state checkpoints; prompts have more, at the end of images and turns."
    encode_budget_patches: Count | None = None
    "Patches that the vision encoder processes in one step; by default 1024 on a CPU, 16384 on a GPU."
    max_inter_token_latency: NotNegative = 0.5
    "Seconds between two tokens of an answer, which prompts and images of others leave it; 0 for no limit."
    enable_prefix_caching: bool = True
    "Reuse the KV cache of prompts that begin alike."
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    "The network's number format; auto is the checkpoint's own, but float32 on a CPU without bfloat16."
    quantization: Annotated[Literal["fp8", "int8", "int4"] | None, Parameter(alias="-q")] = None
    "Round plain weights after they are loaded: int8 or int4 on a CPU, fp8 on a GPU; quantised ones need no flag."
    kv_cache_dtype: KvCacheDtype = "auto"
    "Number format of the KV cache; auto is the network's, fp8 is e4m3 with the checkpoint's scales, else 1."
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    "auto and safetensors read the weights; dummy makes random ones, to try a model's shape without its weights."
    revision: str | None = None
    "Branch, tag or commit of a model on a hub; `MODEL@REVISION` means the same."
    download_dir: str | None = None
    "Folder of models that are fetched from a hub; by default HF_HUB_CACHE."
    seed: int | None = None
    "Seed of the random numbers of requests without `seed`: the same requests in the same order draw the same."
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "The network's device; auto takes a GPU if there is one."
    attention_backend: Literal["auto", "torch_sdpa", "onednn", "triton", "flashinfer"] = "auto"
    "Backend of the language model's attention; the summary of the start explains the choice of auto."
    mm_encoder_attn_backend: Annotated[
        Literal["auto", "torch_sdpa", "onednn", "triton", "flashinfer_cudnn", "torch_varlen", "openvino", "amx"],
        Parameter(alias="--mm-attention-backend"),
    ] = "auto"
    "Backend of the vision encoder's attention; the summary of the start explains the choice of auto."
    cuda_graphs: bool | None = None
    "Repeat decode steps as CUDA graphs; by default on a GPU, if the model and the backend can. Never run on one yet."
    mm_encoder_cuda_graph: bool = False
    "Repeat the vision encoder as CUDA graphs; the summary of the start says why not. Never run on a GPU yet."
    async_scheduling: bool | None = None
    "Launch a step before the tokens of the last one are collected; by default on a GPU only."
    speculative_config: Annotated[JsonObject | None, Parameter(alias="-sc")] = None
    "Propose tokens and verify them together, as JSON: method (ngram, mtp), num_speculative_tokens, prompt_lookup_*."
    threads: Count | None = None
    "CPU threads of the network, in each process; by default OMP_NUM_THREADS, else one less than there are cores."
    tensor_parallel_size: Annotated[Count, Parameter(alias="-tp")] = 1
    "Processes that compute the model together, each with its part of the weights on its own GPU."
    attention_tensor_parallel_size: Annotated[Count | None, Parameter(alias="--attn-tp-size")] = None
    "How many of these processes share the attention and the KV cache, by default all; the others hold copies."
    mm_encoder_tp_mode: Literal["data", "weights"] = "data"
    "How these processes share the vision encoder: data gives each whole images, weights cuts its matrices."
    engine_silence: Seconds = 300.0
    "Seconds that one step may take before the engine counts as hung and is replaced."
    trust_remote_code: Switch = False
    "Accepted and ignored: code that ships with a model is never run."
    record_steps: Annotated[str | None, Parameter(converter=_absolute, metavar="PATH")] = None
    "A folder to record steps in, for `saccade replay`. They hold prompts and answers."
    record_steps_bytes: Annotated[Size, Parameter(validator=Number(gte=MIB))] = GIB
    "Bytes of recorded steps to keep; the oldest are deleted."
    record_pixels: Switch = False
    "Record images' pixels too; without them, steps that encode an image cannot be replayed."

    def limits(self, device: str, *, has_states: bool = False) -> Limits:
        """Return a step's limits on this type of *device*. *has_states* says whether the model has recurrent layers."""
        default = ON_CPU if device == "cpu" else ON_GPU
        tokens = self.max_num_batched_tokens or max(default.max_num_batched_tokens, self.max_num_seqs or 0)
        # Each sequence's state takes tens of megabytes from the start.
        rows = (ON_CPU if has_states else default).max_num_seqs
        patches = self.encode_budget_patches or default.encode_budget_patches
        return Limits(self.max_num_seqs or min(rows, tokens), tokens, patches)


@Parameter(name="*", group=Group("Prefill/decode split", sort_key=4))
@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """The worker's role when one worker prefills a prompt and another decodes it."""

    role: Role = "both"
    "prefill computes prompts and sends their KV state to workers of role decode; both serves requests alone."
    kv_transfer_bind: str | None = None
    "Where a prefill worker listens for decode workers, HOST:PORT, an address that they reach; default 127.0.0.1:0."
    kv_transfer_seconds: Annotated[Seconds, Parameter(name="--kv-transfer-timeout")] = 60.0
    "Seconds that a transfer may stand still, and that a computed prompt is kept for its decode worker."

    def bind(self) -> str | None:
        """Return where a prefill worker listens; None for other roles. Raises StartupError."""
        if self.role != "prefill":
            if self.kv_transfer_bind is not None:
                raise StartupError(f"--kv-transfer-bind is for --role prefill; the role here is {self.role}.")
            return None
        bind = self.kv_transfer_bind or "127.0.0.1:0"
        host, _, port = bind.rpartition(":")
        if not host or read_port(port) is None:
            raise StartupError(f"--kv-transfer-bind is HOST:PORT, such as 10.0.0.5:9100, not {bind!r}.")
        if host.strip("[]") in ("0.0.0.0", "::", "*"):  # noqa: S104  refused
            raise StartupError(
                f"--kv-transfer-bind {bind} names every address of this machine, but decode workers connect to "
                "one: name the address that they reach."
            )
        return bind


@dataclass(frozen=True)
class EngineConfig(EngineSettings, SplitSettings):
    """All of an engine's settings, which its process receives as JSON."""

    model_dir: str
    model: str
    "The model's name in answers."
    aliases: tuple[str, ...] = ()
    "Its other names."
    num_blocks: int | None = None
    """Of the KV pool; None derives it from *kv_cache_bytes* if set, else from 1 GiB on the CPU (at most what
    *max_num_seqs* full sequences need) and from *gpu_memory_utilization* of the device on CUDA."""
    num_state_snapshots: int | None = None
    "None is as many as *state_snapshot_bytes* hold on each device."
    kv_events_token_ids: bool = False
    "Block events contain the token ids and media from which their blocks' keys were computed."

    @cached_property
    def speculation(self) -> SpeculativeConfig | None:
        """The configured source of speculative tokens, if any. Raises StartupError."""
        return None if self.speculative_config is None else SpeculativeConfig.read_option(self.speculative_config)

    def check(self) -> None:
        """Raise StartupError for settings that cannot work. The flag parser has already checked their types."""
        if self.max_model_len == 1:
            raise StartupError("--max-model-len must be at least 2: a prompt and an answer have a token each.")
        if self.tensor_parallel_size % (self.attention_tensor_parallel_size or 1):
            raise StartupError(
                f"--attention-tensor-parallel-size must divide --tensor-parallel-size ({self.tensor_parallel_size}), "
                f"and {self.attention_tensor_parallel_size} does not."
            )
        if self.record_pixels and self.record_steps is None:
            raise StartupError("--record-pixels needs --record-steps, the folder to record in.")
        # Reading it checks it.
        _ = self.speculation
        self._check_role()
        tokens, rows = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and rows is not None and tokens < rows:
            raise StartupError(
                f"--max-num-batched-tokens ({tokens}) must be at least --max-num-seqs ({rows}): every running sequence "
                "needs one token a step."
            )

    def _check_role(self) -> None:
        """Raise StartupError for a setting that a prefill/decode split does not support."""
        if self.role == "both":
            return
        if self.tensor_parallel_size > 1:
            raise StartupError(
                f"--role {self.role} needs a --tensor-parallel-size of 1: the KV state of several ranks is not "
                "transferred yet."
            )
        if self.seed is not None:
            raise StartupError(
                f"--seed has no effect with --role {self.role}: the gateway draws the seeds. Leave it out."
            )
        if self.record_steps is not None:
            raise StartupError(
                f"--record-steps does not work with --role {self.role}; record a worker that serves alone."
            )
