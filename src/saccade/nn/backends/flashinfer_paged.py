"""Attention of decoders on a GPU by FlashInfer's kernels for paged caches: a call for decodes, one for prefill chunks.

Source of the arguments: flashinfer/decode.py and flashinfer/prefill.py, release 0.7.2. FlashInfer compiles its kernels
at the first use, which needs a CUDA toolkit, or takes them from its package of compiled ones.

It has never run on a GPU: tests/real binds its calls to the releases' own signatures.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import structlog
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from saccade.nn import context
from saccade.nn.backends.compilers import compilation, no_cuda_compiler
from saccade.nn.backends.flashinfer_latents import LatentAttention, borders
from saccade.nn.backends.workload import HALF, Workload, not_in, not_on_gpu
from saccade.nn.cache_values import CacheValues
from saccade.nn.context import ForwardContext, KvCache, LatentCache, PagedLayout, Scoring
from saccade.nn.transfer import to_device

logger = structlog.get_logger(__name__)

WORKSPACE_BYTES = 128 << 20
HEAD_SIZES = (64, 128, 256)
CACHES = (torch.float8_e4m3fn,)
OLDEST = (0, 7, 2)
"""The first release with WORKSPACE_BYTES enough: older ones need more for models of 64 heads or 4 key/value heads."""


class _Kind(NamedTuple):
    """The properties of layers that share a plan of FlashInfer."""

    num_heads: int
    num_kv_heads: int
    width: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    looks_ahead: bool
    dtype: torch.dtype
    cache_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Pages:
    """The blocks of S sequences, B in total. The borders int32 [S + 1] and lengths int32 [S] are on the host.

    *borders* count blocks; *blocks* int32 [B] is on the device; *last_lengths* count the tokens in each sequence's last
    block. *kinds* are the kinds of layers that FlashInfer has planned for.
    """

    borders: torch.Tensor
    blocks: torch.Tensor
    last_lengths: torch.Tensor
    kinds: set[_Kind] = field(default_factory=set)


class _Captured(NamedTuple):
    """The wrappers of decodes in a CUDA graph, which take up to *num_blocks* blocks in all."""

    num_blocks: int
    latents: LatentAttention
    decoders: dict[tuple[_Kind, int], Any]


@dataclass(frozen=True, slots=True)
class FlashinferPlan:
    """A step's *decodes* and *prefills*, None without any; *query_borders* int32 count the tokens of the prefills.

    *blocks* int32 are those of all sequences, on the device. The wrappers of its *turn*, 0 or 1, compute it, or those
    of a CUDA graph.
    """

    block_size: int
    blocks: torch.Tensor
    decodes: Pages | None
    prefills: Pages | None
    query_borders: torch.Tensor
    turn: int
    captured: "_Captured | None" = None


class AttentionBackend(context.AttentionBackend):
    """nn.context.AttentionBackend."""

    name = "flashinfer"
    metadata = ("slot_mapping", "block_tables", "query_lengths", "host_context_lengths")
    captures_decodes = True
    copies_prefixes = False

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._decoders: dict[tuple[_Kind, int], Any] = {}
        self._prefillers: dict[tuple[_Kind, int], Any] = {}
        self._num_plans = 0
        self._replanned: torch.cuda.Event | None = None
        self._latents = LatentAttention(self._workspace_on)

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        reason = not_on_gpu(workload) or not_in(workload, HALF, () if workload.has_latent_layers else CACHES)
        reason = reason or older_than(OLDEST) or no_cuda_compiler()
        if reason is None and workload.looks_ahead:
            return "it attends causally, and tokens of this model's images see later ones"
        others = sorted(pair for pair in workload.head_sizes if pair[0] != pair[1] or pair[0] not in HEAD_SIZES)
        if reason is None and others:
            head_sizes = ", ".join(map(str, HEAD_SIZES))
            return f"its keys and values have {head_sizes} channels, not {others[0][0]} and {others[0][1]}"
        return reason

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> FlashinferPlan:
        """Bring the lengths and block tables into FlashInfer's form, without reading a value from the device.

        Kernels read a wrapper's plan while the host plans the next step. So there are two sets of wrappers, in turn.
        """
        self._num_plans += 1
        return self._plan(layout)

    def _plan(self, layout: PagedLayout) -> FlashinferPlan:
        contexts = np.array(layout.host_context_lengths, np.int64)
        counts = -(-contexts // layout.block_size)
        width = layout.block_tables.shape[1]
        index = np.concatenate([row * width + np.arange(count) for row, count in enumerate(counts)])
        on_device = to_device(index, layout.block_tables.device)
        blocks = layout.block_tables.flatten().index_select(0, on_device).int()
        last_lengths = torch.from_numpy((contexts - 1) % layout.block_size + 1).int()
        first = layout.num_decodes
        decoded = int(counts[:first].sum())
        return FlashinferPlan(
            layout.block_size,
            blocks,
            Pages(borders(counts[:first]), blocks[:decoded], last_lengths[:first]) if first else None,
            Pages(borders(counts[first:]), blocks[decoded:], last_lengths[first:]) if first < len(counts) else None,
            borders(np.array(layout.query_lengths[first:], np.int64)),
            self._num_plans % 2,
        )

    def plan_captured(self, layout: PagedLayout, dtype: torch.dtype) -> FlashinferPlan:
        """Plan with wrappers of its own, whose buffers never move."""
        num_blocks = layout.block_tables.numel()
        latents = LatentAttention(self._workspace_on, len(layout.query_lengths), num_blocks)
        return replace(self.plan(layout, dtype), captured=_Captured(num_blocks, latents, {}))

    def replan(self, plan: FlashinferPlan, layout: PagedLayout) -> None:
        """Plan every wrapper of *plan* again.

        A wrapper's plan travels through memory of the host, which the next one overwrites. So the host waits until the
        last one was copied: until the step before that one ended, whose tokens are collected by then.
        """
        if self._replanned is not None:
            self._replanned.synchronize()
        fresh = self._plan(layout)
        if plan.captured is not None and fresh.decodes is not None:
            for (kind, _), wrapper in plan.captured.decoders.items():
                _plan_decodes(wrapper, kind, plan.block_size, fresh.decodes)
            plan.captured.latents.replan(layout, fresh.blocks)
        if layout.block_tables.device.type == "cuda":
            self._replanned = torch.cuda.Event()
            self._replanned.record()

    def attend(
        self,
        q_NQD: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        context: ForwardContext,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attend with the decodes in one call, and with the prefill chunks in another."""
        plan: FlashinferPlan = context.plan
        kind = _Kind(q_NQD.shape[1], own[0].shape[1], q_NQD.shape[2], *scoring, q_NQD.dtype, cache.keys.dtype)
        is_scaled = kind.cache_dtype != kind.dtype
        scales = {"k_scale": cache.key_scale, "v_scale": cache.value_scale} if is_scaled else {}
        q, num_decodes = q_NQD.contiguous(), context.layout.num_decodes
        outputs = []
        if plan.decodes is not None:
            wrapper = self._decoder(kind, plan, plan.decodes, q.device)
            outputs.append(wrapper.run(q[:num_decodes], (cache.keys, cache.values), **scales))
        if plan.prefills is not None:
            wrapper = self._prefiller(kind, plan, plan.prefills, q.device)
            outputs.append(wrapper.run(q[num_decodes:], (cache.keys, cache.values), **scales))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)

    def latent(
        self,
        q_NQC: torch.Tensor,
        latent_NC: torch.Tensor,
        layer: int,
        context: ForwardContext,
        *,
        value_width: int,
        scale: float,
    ) -> torch.Tensor:
        """Write latents, then attend to the cache."""
        cache, layout, plan = context.cache(layer, LatentCache), context.layout, context.plan
        CacheValues(cache.latents.flatten(0, 1), cache.scale).write(layout.slot_mapping, latent_NC)
        attend = self._latents if plan.captured is None else plan.captured.latents
        return attend(q_NQC, cache.latents, layout, plan.blocks, plan.turn, value_width=value_width, scale=scale)

    def _decoder(self, kind: _Kind, plan: FlashinferPlan, pages: Pages, device: torch.device) -> Any:
        """Return the wrapper for decodes of *kind*, planned for the step."""
        wrappers = self._decoders if plan.captured is None else plan.captured.decoders
        key = kind, plan.turn
        if key not in wrappers:
            # Its own choice for Hopper, FA3, gives each query head the whole context: FA2 splits long contexts, and
            # reads the keys of heads that share them once.
            wrappers[key] = BatchDecodeWithPagedKVCacheWrapper(
                self._workspace_on(device),
                "NHD",
                use_tensor_cores=True,
                backend="fa2",
                **_buffers(plan, len(pages.last_lengths), device),
            )
        if kind not in pages.kinds:
            pages.kinds.add(kind)
            _plan_decodes(wrappers[key], kind, plan.block_size, pages)
        return wrappers[key]

    def _prefiller(self, kind: _Kind, plan: FlashinferPlan, pages: Pages, device: torch.device) -> Any:
        """Return the wrapper for prefill chunks of *kind*, planned for the step."""
        key = kind, plan.turn
        if key not in self._prefillers:
            self._prefillers[key] = BatchPrefillWithPagedKVCacheWrapper(self._workspace_on(device), "NHD")
        if kind not in pages.kinds:
            pages.kinds.add(kind)
            self._prefillers[key].plan(
                plan.query_borders,
                pages.borders,
                pages.blocks,
                pages.last_lengths,
                kind.num_heads,
                kind.num_kv_heads,
                kind.width,
                plan.block_size,
                causal=True,
                **_options(kind),
            )
        return self._prefillers[key]

    def _workspace_on(self, device: torch.device) -> torch.Tensor:
        if self._workspace is None:
            if (notice := compilation()) is not None:
                logger.warning(notice)
            # Zeros, as the wrapper for decodes needs. Wrappers can share it, since calls run one after the other.
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


def _buffers(plan: FlashinferPlan, num_rows: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a wrapper for CUDA graphs, which copies its plan into these int32 buffers."""
    if plan.captured is None:
        return {}
    sizes = {"paged_kv_indptr_buffer": num_rows + 1, "paged_kv_indices_buffer": plan.captured.num_blocks,
             "paged_kv_last_page_len_buffer": num_rows}  # fmt: skip
    buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    return {"use_cuda_graph": True, **buffers}


def _plan_decodes(wrapper: Any, kind: _Kind, block_size: int, pages: Pages) -> None:
    wrapper.plan(
        pages.borders,
        pages.blocks,
        pages.last_lengths,
        kind.num_heads,
        kind.num_kv_heads,
        kind.width,
        block_size,
        **_options(kind),
    )


def _options(kind: _Kind) -> dict[str, Any]:
    """Return the arguments that both wrappers' plans have in common."""
    return {
        "sm_scale": kind.scale,
        # FlashInfer's window counts the tokens before the query's own.
        "window_left": -1 if kind.window is None else kind.window - 1,
        "logits_soft_cap": kind.soft_cap,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.cache_dtype,
    }


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
