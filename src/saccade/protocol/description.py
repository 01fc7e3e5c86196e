"""Description: a worker's answer to Describe. It contains the model's files, so a gateway needs none of its own."""

from typing import Annotated, Literal

import msgspec

Role = Literal["both", "prefill", "decode"]
"""The task of a worker. A prefill worker computes prompts and sends their KV state to decode workers."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """A checkpoint's small files by name (config.json, tokenizer.json, ...), as bytes; weights are never sent."""

    files: dict[str, bytes]


NO_FILES = ModelFiles(files={})


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to Describe."""

    model: str
    """Its first name."""
    fingerprint: bytes
    """32 bytes that name model and weights for block keys."""
    files: ModelFiles
    """Empty if *files_digest* stands for them."""
    max_model_len: Positive
    """Tokens of a prompt and its answer."""
    max_num_seqs: Positive
    """Sequences that it computes at a time."""
    block_size: Positive
    """Tokens of a KV block."""
    num_blocks: Count
    """KV blocks of the layers that attend to all tokens."""
    dtype: str
    """The network's, and its KV cache's unless *kv_cache_dtype* names another."""
    device: str
    shm_namespace: str
    """Equals a gateway's own if both see the same /dev/shm and, on our own wire, run as the same user; else it
    differs."""
    version: str
    pixel_dtype: str = "uint8"
    """uint8 on our own wire; on others the dtype of the normalised values that the worker takes."""
    takes_resets: bool = False
    """Whether it knows the command ResetCaches."""
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    aliases: tuple[str, ...] = ()
    """Other names of the model."""
    attention_backend: str = ""
    """"" if the worker does not report it; *mm_encoder_attn_backend* alike."""
    mm_encoder_attn_backend: str = ""
    resumes_at_states: bool = False
    """Whether the model has recurrent layers, so that prompts resume only at the keys of StateStored events."""
    num_state_checkpoints: Count = 0
    """How many of these states the worker keeps at most."""
    backend_reasons: tuple[str, ...] = ()
    kv_cache_dtype: str = ""
    role: Role = "both"
    kv_transfer_address: str | None = None
    """host:port from which decode workers get KV state of a prefill worker."""
    weights: bytes = b""
    """32 bytes that name the weights without the files; b"" if the worker does not report it."""
    takes_grammars: bool = False
    """Whether it acts on SamplingParams.grammar."""
    takes_thinking_budgets: bool = False
    """Whether it acts on SamplingParams.thinking_budget."""
    window: Count = 0
    """The number of tokens that a token sees in some layers; 0 without such layers."""
    num_window_blocks: Count = 0
    """KV blocks of these layers."""
    note: str = ""
    """A sentence for people: what they must know about the model's answers. "" for nothing."""
    weight_formats: str = ""
    """The formats of quantised weights, for people. "" if all are plain, or if the worker does not report it."""
    rounding_saves: Count = 0
    """Bytes of memory that --quantization int8 would save; 0 if nothing, or if the worker does not report it."""
    step_bytes: Count = 0
    """Bytes of weights that a step with one token reads on a CPU; 0 if unknown, or on another device."""
    files_digest: bytes = b""
    """identity.content.files_digest() of the files, if the gateway asked for it instead of the files."""
