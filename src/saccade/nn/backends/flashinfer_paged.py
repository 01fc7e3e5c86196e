"""Attention of decoders on a GPU by FlashInfer's kernels for paged caches, for prefill chunks and decodes in one call.

Source of the arguments: BatchPrefillWithPagedKVCacheWrapper in flashinfer/prefill.py, release 0.7.2. FlashInfer
compiles its kernels at the first use, which needs a CUDA toolkit, or takes them from its package of compiled ones.

It has never run on a GPU: tests/real binds its calls to the releases' own signatures.
"""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import structlog
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper

from saccade.nn.backends.compilers import compilation, no_cuda_compiler
from saccade.nn.backends.paged import PagedAttention, Scoring
from saccade.nn.backends.workload import HALF, Workload, not_for_latents, not_in, not_on_gpu
from saccade.nn.context import ForwardContext, KvCache, PagedLayout
from saccade.nn.transfer import to_device

logger = structlog.get_logger(__name__)

WORKSPACE_BYTES = 128 << 20
HEAD_SIZES = (64, 128, 256)
OLDEST = (0, 7, 2)
"""The first release with WORKSPACE_BYTES enough: older ones need more for models of 64 heads or 4 key/value heads."""


class _Kind(NamedTuple):
    """The properties of layers that share a plan of FlashInfer."""

    num_heads: int
    num_kv_heads: int
    key_width: int
    value_width: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FlashinferPlan:
    """A step of S sequences with B blocks in total. The borders int32 [S + 1] and lengths int32 [S] are on the host.

    *query_borders* count tokens, *block_borders* blocks; *blocks* int32 [B] is on the device; *last_lengths* count the
    tokens in each sequence's last block. *kinds* are the kinds of layers that FlashInfer has planned for, with the
    wrappers of this *turn*.
    """

    query_borders: torch.Tensor
    block_borders: torch.Tensor
    blocks: torch.Tensor
    last_lengths: torch.Tensor
    block_size: int
    turn: int
    kinds: set[_Kind] = field(default_factory=set)


class AttentionBackend(PagedAttention):
    """nn.context.AttentionBackend."""

    name = "flashinfer"
    metadata = ("slot_mapping", "block_tables", "query_lengths", "host_context_lengths")
    captures_decodes = False
    copies_prefixes = False

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[_Kind, int], Any] = {}
        self._num_plans = 0

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        reason = not_on_gpu(workload) or not_in(workload, HALF) or not_for_latents(workload)
        reason = reason or older_than(OLDEST) or no_cuda_compiler()
        others = sorted(pair for pair in workload.head_sizes if pair[0] != pair[1] or pair[0] not in HEAD_SIZES)
        if reason is None and others:
            head_sizes = ", ".join(map(str, HEAD_SIZES))
            return f"its keys and values have {head_sizes} channels, not {others[0][0]} and {others[0][1]}"
        return reason

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> FlashinferPlan:
        """Bring the lengths and block tables into FlashInfer's form, without reading a value from the device.

        A wrapper's plan lies in buffers that its kernels read while the host plans the next step: two take turns.
        """
        self._num_plans += 1
        contexts = np.array(layout.host_context_lengths, np.int64)
        num_blocks = -(-contexts // layout.block_size)
        width = layout.block_tables.shape[1]
        index = np.concatenate([row * width + np.arange(count) for row, count in enumerate(num_blocks)])
        on_device = to_device(index, layout.block_tables.device)
        return FlashinferPlan(
            _borders(np.array(layout.query_lengths, np.int64)),
            _borders(num_blocks),
            layout.block_tables.flatten().index_select(0, on_device).int(),
            torch.from_numpy((contexts - 1) % layout.block_size + 1).int(),
            layout.block_size,
            self._num_plans % 2,
        )

    def attend(
        self,
        q_NQD: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        context: ForwardContext,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend with all tokens of the step in one call."""
        k_NKD, v_NKW = own
        kind = _Kind(q_NQD.shape[1], k_NKD.shape[1], k_NKD.shape[2], v_NKW.shape[2], *scoring, q_NQD.dtype)
        wrapper = self._wrapper_for(kind, context.plan, q_NQD.device)
        return wrapper.run(q_NQD.contiguous(), (cache.keys, cache.values)).flatten(1)  # type: ignore[no-any-return]

    def _wrapper_for(self, kind: _Kind, plan: FlashinferPlan, device: torch.device) -> Any:
        """Return the wrapper for *kind*, planned for the step."""
        if self._workspace is None:
            if (notice := compilation()) is not None:
                logger.warning(notice)
            # Zeros, as FlashInfer's examples have it. Wrappers can share it, since layers run one after the other.
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if (kind, plan.turn) not in self._wrappers:
            self._wrappers[kind, plan.turn] = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        wrapper = self._wrappers[kind, plan.turn]
        if kind not in plan.kinds:
            plan.kinds.add(kind)
            wrapper.plan(
                plan.query_borders,
                plan.block_borders,
                plan.blocks,
                plan.last_lengths,
                kind.num_heads,
                kind.num_kv_heads,
                kind.key_width,
                plan.block_size,
                head_dim_vo=kind.value_width,
                causal=True,
                sm_scale=kind.scale,
                # FlashInfer's window counts the tokens before the query's own.
                window_left=-1 if kind.window is None else kind.window - 1,
                logits_soft_cap=kind.soft_cap,
                q_data_type=kind.dtype,
                kv_data_type=kind.dtype,
            )
        return wrapper


def older_than(oldest: tuple[int, ...]) -> str | None:
    """Return the reason against a FlashInfer older than *oldest*; None if it is not older, or has no version."""
    release = str(getattr(flashinfer, "__version__", ""))
    if not (numbers := re.match(r"(\d+)\.(\d+)\.(\d+)", release)):
        return None
    oldest_release = ".".join(map(str, oldest))
    is_older = tuple(map(int, numbers.groups())) < oldest
    return (
        f"its release {release} is older than {oldest_release}; `pip install 'saccade[gpu]'` installs another"
        if is_older
        else None
    )


def _borders(lengths: "np.ndarray[Any, np.dtype[np.int64]]") -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], lengths.cumsum()))).int()
