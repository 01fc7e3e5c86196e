"""The settings of one engine."""

from dataclasses import dataclass
from typing import get_args

from saccade.errors import StartupError
from saccade.protocol.description import Role

DEVICES = ("auto", "cpu", "cuda")
ENCODER_TP_MODES = ("data", "weights")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "fp8")
OTHER_NAMES = {
    "kv_cache_bytes": "--kv-cache-memory-bytes",
    "num_blocks": "num_blocks",
    "num_state_snapshots": "num_state_snapshots",
}
"""What errors call fields that have a flag of another name, or none."""

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine; sent to the engine's process as JSON.

    *dtype* auto is the checkpoint's own; on a CPU it is float32 unless checkpoint and processor support bfloat16.
    *kv_cache_dtype* auto is the network's; fp8 is e4m3. *max_model_len* None is the model's, limited by the KV pool.
    *num_blocks* None derives the pool's size from *kv_cache_bytes* if given, else from 1 GiB on the CPU (at most what
    max_num_seqs full sequences need) and *gpu_memory_utilization* of the device on CUDA. *encode_budget_patches* limits
    what the vision encoder computes in one step; None is 16384 on CUDA and 1024 on the CPU: there, encoding many images
    at once takes as long as one after another and only delays the first. *max_num_waiting* limits the queue. *threads*
    None leaves one core to the other processes, unless OMP_NUM_THREADS sets a number. *tensor_parallel_size* processes
    compute the network together, each with its part of the weights on its own device; *threads* is the number of each.
    *attention_tensor_parallel_size* of them share the decoder's attention and its KV cache, by default all; it divides
    their number, and the others hold copies. *mm_encoder_tp_mode* data has each of them encode whole images; weights
    cuts the vision encoder as well. For a model with recurrent layers, checkpoints of their states are kept for the
    prefix cache, taken every *state_snapshot_blocks* blocks and at the end of prompts: *num_state_snapshots*, by
    default as many as *state_snapshot_bytes* hold on each device. With *kv_events_token_ids*, block events contain the
    token ids and media from which their blocks' keys were computed. *aliases* are names in addition to *model*.
    *record_steps* is the folder for recordings of steps, of at most *record_steps_bytes*, with images' pixels if
    *record_pixels* is set. A *role* prefill or decode makes the engine one half of a prefill/decode split; a prefill
    engine listens on *kv_transfer_bind*, host:port. A transfer that stands still for *kv_transfer_seconds* fails.
    """

    model_dir: str
    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_num_waiting: int = 1024
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    encoder_cache_bytes: int = GIB
    encode_budget_patches: int | None = None
    attention_backend: str = "auto"
    mm_encoder_attn_backend: str = "auto"
    cuda_graphs: bool = False
    mm_encoder_cuda_graph: bool = False
    threads: int | None = None
    tensor_parallel_size: int = 1
    attention_tensor_parallel_size: int | None = None
    mm_encoder_tp_mode: str = "data"
    enable_prefix_caching: bool = True
    num_state_snapshots: int | None = None
    state_snapshot_bytes: int = GIB
    state_snapshot_blocks: int = 64
    kv_events_token_ids: bool = False
    aliases: tuple[str, ...] = ()
    record_steps: str | None = None
    record_steps_bytes: int = GIB
    record_pixels: bool = False
    role: Role = "both"
    kv_transfer_bind: str | None = None
    kv_transfer_seconds: float = 60.0

    def check(self) -> None:
        """Raise StartupError, naming the setting, if a value is invalid."""
        choices = (
            ("device", DEVICES),
            ("dtype", DTYPES),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("mm_encoder_tp_mode", ENCODER_TP_MODES),
        )
        for name, options in choices:
            if getattr(self, name) not in options:
                raise StartupError(f"{_flag(name)} must be one of {', '.join(options)}, not {getattr(self, name)!r}.")
        counts = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "block_size")
        sizes = ("num_blocks", "kv_cache_bytes", "encode_budget_patches", "state_snapshot_blocks", "threads")
        for name in (*counts, *sizes, "tensor_parallel_size", "attention_tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StartupError(f"{_flag(name)} must be at least 1, not {value}.")
        for name in ("encoder_cache_bytes", "num_state_snapshots", "state_snapshot_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise StartupError(f"{_flag(name)} must not be negative, not {value}.")
        if self.tensor_parallel_size % (self.attention_tensor_parallel_size or 1):
            raise StartupError(
                f"--attention-tensor-parallel-size must divide --tensor-parallel-size ({self.tensor_parallel_size}), "
                f"and {self.attention_tensor_parallel_size} does not."
            )
        if self.cuda_graphs and self.tensor_parallel_size > 1:
            raise StartupError("--cuda-graphs needs a --tensor-parallel-size of 1: steps of ranks are not captured.")
        if self.record_pixels and self.record_steps is None:
            raise StartupError("--record-pixels needs --record-steps, the folder to record in.")
        if self.record_steps_bytes < MIB:
            raise StartupError(f"--record-steps-bytes must be at least {MIB}, not {self.record_steps_bytes}.")
        self._check_role()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise StartupError(
                f"--gpu-memory-utilization must be over 0 and at most 1, not {self.gpu_memory_utilization}."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): every running sequence needs one token a step."
            )

    def _check_role(self) -> None:
        """Raise StartupError for what an engine of a prefill/decode split cannot do."""
        if self.role not in get_args(Role):
            raise StartupError(f"--role must be one of {', '.join(get_args(Role))}, not {self.role!r}.")
        if (self.kv_transfer_bind is not None) != (self.role == "prefill"):
            raise StartupError(
                f"The role is {self.role}: --kv-transfer-bind, where decode workers connect, is for --role prefill, "
                "and needed there."
            )
        if self.role == "both":
            return
        if self.tensor_parallel_size > 1:
            raise StartupError(
                f"--role {self.role} needs a --tensor-parallel-size of 1: the KV state of several ranks is not "
                "transferred yet."
            )
        if self.record_steps is not None:
            raise StartupError(
                f"--record-steps does not work with --role {self.role}; record a worker that serves alone."
            )
        if self.kv_transfer_seconds <= 0:
            raise StartupError(f"--kv-transfer-timeout must be over 0, not {self.kv_transfer_seconds}.")


def _flag(name: str) -> str:
    """Return the flag that sets the field *name*."""
    return OTHER_NAMES.get(name) or f"--{name.replace('_', '-')}"
