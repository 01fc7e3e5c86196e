"""Attention of decoders on a GPU by FlashInfer's paged kernels: one call for decodes, one for prefill chunks.

Source of the arguments: flashinfer/decode.py and flashinfer/prefill.py, release 0.7.2. FlashInfer compiles its kernels
at the first use, which needs a CUDA toolkit, or takes them from its package of compiled ones.

It has never run on a GPU; tests/real checks its calls against the releases' own signatures.
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import flashinfer
import numpy as np
import structlog
import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from saccade.nn import context
from saccade.nn.backends.compilers import FA3_HEADER, compilation, no_cuda_compiler
from saccade.nn.backends.flashinfer_latents import LatentKind, LatentStep, new_latent_wrapper, plan_latents
from saccade.nn.backends.flashinfer_wrappers import Wrappers, borders, graph_buffers
from saccade.nn.backends.workload import HALF, Workload, not_in, not_on_gpu
from saccade.nn.cache_values import CacheValues
from saccade.nn.context import ForwardContext, KvCache, LatentCache, PagedLayout, Scoring
from saccade.nn.transfer import to_device

logger = structlog.get_logger(__name__)

WORKSPACE_BYTES = 128 << 20
HEAD_SIZES = (64, 128, 256)
CACHES = (torch.float8_e4m3fn,)
HOPPER = 9
"""The major number of the compute capability of H100 and H200."""

OLDEST = (0, 7, 2)
"""The first release with WORKSPACE_BYTES enough: older ones need more for models of 64 heads or 4 key/value heads."""


class _Kind(NamedTuple):
    """The properties that layers must share to use one FlashInfer plan."""

    num_heads: int
    num_kv_heads: int
    width: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    looks_ahead: bool
    dtype: torch.dtype
    cache_dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """The blocks of S sequences, B in total. The borders int32 [S + 1] and lengths int32 [S] are on the host.

    *borders* count blocks, *blocks* int32 [B] are on the device, and *last_lengths* count the tokens in each sequence's
    last block. *query_borders* count the tokens of prefill chunks.
    """

    block_size: int
    borders: torch.Tensor
    blocks: torch.Tensor
    last_lengths: torch.Tensor
    query_borders: torch.Tensor | None = None


class _AllWrappers(NamedTuple):
    """The wrappers for decodes, prefill chunks and latent layers; that of latent layers takes decodes and chunks."""

    decoders: Wrappers[_Kind, Pages]
    prefillers: Wrappers[_Kind, Pages]
    latents: Wrappers[LatentKind, LatentStep]


@dataclass(frozen=True, slots=True)
class FlashinferPlan:
    """A step's *decodes* and *prefills*, each None if there are none, and all of them as a step over *latents*.

    The *wrappers* compute the step.
    """

    decodes: Pages | None
    prefills: Pages | None
    latents: LatentStep
    wrappers: _AllWrappers


class AttentionBackend(context.AttentionBackend):
    """Implements nn.context.AttentionBackend with FlashInfer's wrappers."""

    name = "flashinfer"
    metadata = ("slot_mapping", "block_tables", "query_lengths", "host_context_lengths")
    captures_decodes = True
    copies_prefixes = False

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None
        self._wrappers = self._new_wrappers()

    @staticmethod
    def unavailable(workload: Workload) -> str | None:
        """Return why this backend cannot compute *workload*; None if it can."""
        reason = not_on_gpu(workload) or not_in(workload, HALF, () if workload.has_latent_layers else CACHES)
        reason = reason or older_than(OLDEST) or no_cuda_compiler(*_headers(workload))
        if reason is None and workload.looks_ahead:
            return "it attends causally, and tokens of this model's images see later ones"
        others = sorted(pair for pair in workload.head_sizes if pair[0] != pair[1] or pair[0] not in HEAD_SIZES)
        if reason is None and others:
            head_sizes = ", ".join(map(str, HEAD_SIZES))
            return f"its keys and values have {head_sizes} channels, not {others[0][0]} and {others[0][1]}"
        return reason

    def plan(self, layout: PagedLayout, dtype: torch.dtype) -> FlashinferPlan:
        """Convert the lengths and block tables to FlashInfer's form, without reading a value from the device."""
        return FlashinferPlan(*_steps(layout), self._wrappers)

    def plan_captured(self, layout: PagedLayout, dtype: torch.dtype) -> FlashinferPlan:
        """Plan with separate wrappers, whose buffers never move."""
        return replace(self.plan(layout, dtype), wrappers=self._new_wrappers(layout.block_tables.numel()))

    def replan(self, plan: FlashinferPlan, layout: PagedLayout) -> None:
        """Plan every wrapper of *plan* again, once its last plan has been copied to the device."""
        device, (decodes, _, latents) = layout.block_tables.device, _steps(layout)
        if decodes is not None:
            plan.wrappers.decoders.replan(decodes, device)
        plan.wrappers.latents.replan(latents, device)

    def attend(
        self,
        q_NQD: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        context: ForwardContext,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Compute attention for the decodes in one call, and for the prefill chunks in another."""
        plan: FlashinferPlan = context.plan
        kind = _Kind(q_NQD.shape[1], own[0].shape[1], q_NQD.shape[2], *scoring, q_NQD.dtype, cache.keys.dtype)
        is_scaled = kind.cache_dtype != kind.dtype
        scales = {"k_scale": cache.key_scale, "v_scale": cache.value_scale} if is_scaled else {}
        q, num_decodes = q_NQD.contiguous(), context.layout.num_decodes
        outputs = []
        if plan.decodes is not None:
            wrapper = plan.wrappers.decoders.of(kind, plan.decodes)
            outputs.append(wrapper.run(q[:num_decodes], (cache.keys, cache.values), **scales))
        if plan.prefills is not None:
            wrapper = plan.wrappers.prefillers.of(kind, plan.prefills)
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
        cache, plan = context.cache(layer, LatentCache), context.plan
        CacheValues(cache.latents.flatten(0, 1), cache.scale).write(context.layout.slot_mapping, latent_NC)
        kind = LatentKind(q_NQC.shape[1], value_width, q_NQC.shape[2], scale, q_NQC.dtype)
        wrapper = plan.wrappers.latents.of(kind, plan.latents)
        return wrapper.run(query=q_NQC.contiguous(), kv_cache=cache.latents)  # type: ignore[no-any-return]

    def _new_wrappers(self, num_blocks: int = 0) -> _AllWrappers:
        """Return new wrappers. With *num_blocks*, they are for decodes in a CUDA graph of at most that many blocks."""
        return _AllWrappers(
            Wrappers(partial(self._new_decoder, num_blocks), _plan_decodes),
            Wrappers(self._new_prefiller, _plan_prefills),
            Wrappers(partial(self._new_latents, num_blocks), plan_latents),
        )

    def _new_decoder(self, num_blocks: int, pages: Pages) -> Any:
        device, num_rows = pages.blocks.device, len(pages.last_lengths)
        # Its own choice for Hopper, FA3, gives each query head the whole context: FA2 splits long contexts, and reads
        # the keys of heads that share them once.
        options: dict[str, Any] = {"use_tensor_cores": True, "backend": "fa2"}
        if num_blocks:
            options |= graph_buffers(
                device,
                paged_kv_indptr_buffer=num_rows + 1,
                paged_kv_indices_buffer=num_blocks,
                paged_kv_last_page_len_buffer=num_rows,
            )
        return BatchDecodeWithPagedKVCacheWrapper(self._workspace_on(device), "NHD", **options)

    def _new_prefiller(self, pages: Pages) -> Any:
        return BatchPrefillWithPagedKVCacheWrapper(self._workspace_on(pages.blocks.device), "NHD")

    def _new_latents(self, num_blocks: int, step: LatentStep) -> Any:
        num_rows = len(step.layout.query_lengths) if num_blocks else 0
        return new_latent_wrapper(self._workspace_on(step.blocks.device), num_rows, num_blocks)

    def _workspace_on(self, device: torch.device) -> torch.Tensor:
        if self._workspace is None:
            if (notice := compilation()) is not None:
                logger.warning(notice)
            # Zeros, as the wrapper for decodes needs. Wrappers can share it, since calls run one after the other.
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


def _steps(layout: PagedLayout) -> tuple[Pages | None, Pages | None, LatentStep]:
    """Return *layout*'s decodes and prefill chunks, each None if there are none, and both as a step over latents."""
    contexts = np.array(layout.host_context_lengths, np.int64)
    counts = -(-contexts // layout.block_size)
    width = layout.block_tables.shape[1]
    index = np.concatenate([row * width + np.arange(count) for row, count in enumerate(counts)])
    on_device = to_device(index, layout.block_tables.device)
    blocks = layout.block_tables.flatten().index_select(0, on_device).int()
    last_lengths = torch.from_numpy((contexts - 1) % layout.block_size + 1).int()
    first, decodes, prefills = layout.num_decodes, None, None
    num_decoded = int(counts[:first].sum())
    if first:
        decodes = Pages(layout.block_size, borders(counts[:first]), blocks[:num_decoded], last_lengths[:first])
    if first < len(counts):
        queries = borders(np.array(layout.query_lengths[first:], np.int64))
        prefills = Pages(
            layout.block_size, borders(counts[first:]), blocks[num_decoded:], last_lengths[first:], queries
        )
    return decodes, prefills, LatentStep(layout, blocks)


def _headers(workload: Workload) -> tuple[str, ...]:
    """Return the headers that the kernels for *workload* include. On Hopper, FlashInfer uses FA3 for chunks."""
    is_hopper = torch.cuda.get_device_capability(workload.device)[0] == HOPPER
    return (FA3_HEADER,) if is_hopper and workload.cache_dtype in (None, *HALF) else ()


def _plan_decodes(wrapper: Any, kind: _Kind, pages: Pages) -> None:
    sizes = kind.num_heads, kind.num_kv_heads, kind.width, pages.block_size
    wrapper.plan(pages.borders, pages.blocks, pages.last_lengths, *sizes, **_options(kind))


def _plan_prefills(wrapper: Any, kind: _Kind, pages: Pages) -> None:
    sizes = kind.num_heads, kind.num_kv_heads, kind.width, pages.block_size
    places = pages.query_borders, pages.borders, pages.blocks, pages.last_lengths
    wrapper.plan(*places, *sizes, causal=True, **_options(kind))


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
    """Return the reason against FlashInfer if it is older than *oldest*; None if it is not, or has no version."""
    release = str(getattr(flashinfer, "__version__", ""))
    if not (numbers := re.match(r"(\d+)\.(\d+)\.(\d+)", release)):
        return None
    oldest_release = ".".join(map(str, oldest))
    is_older = tuple(map(int, numbers.groups())) < oldest
    return (
        f"its release {release} is older than {oldest_release}; `pip install 'saccade-vlm[gpu]'` installs another"
        if is_older
        else None
    )
