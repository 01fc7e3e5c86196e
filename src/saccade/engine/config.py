"""EngineConfig: what the operator chose for one engine."""

from dataclasses import dataclass

from saccade.errors import StartupError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
GIB = 1 << 30


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is started with; travels to its process as JSON.

    *dtype* auto is float32 on the CPU and the checkpoint's own on CUDA. *max_model_len* None is the model's, as far as
    the KV pool reaches. *num_blocks* None sizes the pool: by *kv_cache_bytes* where given, else 1 GiB on the CPU (never
    more than max_num_seqs full sequences need) and *gpu_memory_utilization* of the device on CUDA.
    *encode_budget_patches* bounds what the vision encoder does in one step; None is 16384 on CUDA and 1024 on the CPU,
    where many pictures at once take as long as one after the other, and the first would only wait for the last.
    *max_num_waiting* bounds the queue. *threads* None leaves one core to the other processes, unless OMP_NUM_THREADS
    says otherwise. *kv_events_token_ids* has block events hold what their blocks' keys were made of. *aliases* are
    names beside *model*.
    """

    model_dir: str
    model: str
    device: str = "auto"
    dtype: str = "auto"
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
    threads: int | None = None
    enable_prefix_caching: bool = True
    kv_events_token_ids: bool = False
    aliases: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise StartupError, naming the setting, where a value cannot work."""
        for name, known in (("device", DEVICES), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise StartupError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}.")
        counts = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "block_size")
        for name in (*counts, "num_blocks", "kv_cache_bytes", "encode_budget_patches", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StartupError(f"{name} must be at least 1, not {value}.")
        if self.encoder_cache_bytes < 0:
            raise StartupError(f"encoder_cache_bytes must not be negative, not {self.encoder_cache_bytes}.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise StartupError(
                f"gpu_memory_utilization must be over 0 and at most 1, not {self.gpu_memory_utilization}."
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token a step."
            )
