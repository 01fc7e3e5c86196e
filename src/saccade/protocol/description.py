"""Description: a worker's answer to Describe. It has the model's files, so a gateway needs none."""

from typing import Annotated, Literal

import msgspec

Role = Literal["both", "prefill", "decode"]
"""The task of a worker. A prefill worker computes prompts and sends their KV state to decode workers."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint's small files by name (config.json, tokenizer.json, ...), as bytes; weights never travel."""

    files: dict[str, bytes]


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's answer to Describe.

    *fingerprint* (32 bytes) names model and weights for block keys; *shm_namespace* equals a gateway's own exactly when
    both see the same /dev/shm and, on our own wire, run as the same user. *max_model_len* and *block_size* count
    tokens. *dtype* is the network's, and its KV cache's unless *kv_cache_dtype* names another. *pixel_dtype* is uint8
    on our own wire; on others it is the dtype of the normalised values that the worker takes.
    *takes_resets*: the worker knows the command ResetCaches. *takes_grammars*: it acts on SamplingParams.grammar.
    *takes_thinking_budgets*: the worker acts on SamplingParams.thinking_budget.
    *aliases* are other names of the model. The names of attention backends are empty if the worker does not report
    them.
    *resumes_at_states*: the model has recurrent layers, so prompts resume only at the keys of StateStored events; the
    worker keeps up to *num_state_checkpoints* of them.
    *window*: the number of tokens that a token sees in some layers, which have *num_window_blocks* of their own; 0
    without such layers.
    *kv_transfer_address*, host:port, is where decode workers get KV state from a prefill worker.
    *weights* (32 bytes) names the weights without the files; b"" if the worker does not report it.
    *note* is a sentence for people: what they must know about the model's answers, "" for nothing.
    """

    model: str
    fingerprint: bytes
    files: ModelFiles
    max_model_len: Positive
    max_num_seqs: Positive
    block_size: Positive
    num_blocks: Count
    dtype: str
    device: str
    shm_namespace: str
    version: str
    pixel_dtype: str = "uint8"
    takes_resets: bool = False
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float | None = None
    aliases: tuple[str, ...] = ()
    attention_backend: str = ""
    mm_encoder_attn_backend: str = ""
    resumes_at_states: bool = False
    num_state_checkpoints: Count = 0
    backend_reasons: tuple[str, ...] = ()
    kv_cache_dtype: str = ""
    role: Role = "both"
    kv_transfer_address: str | None = None
    weights: bytes = b""
    takes_grammars: bool = False
    takes_thinking_budgets: bool = False
    window: Count = 0
    num_window_blocks: Count = 0
    note: str = ""
