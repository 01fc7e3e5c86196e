"""Libraries for GPUs as they are published, played on a CPU: their signatures, what they demand, and the right result.

Source of the signatures and demands: flashinfer/prefill.py and flashinfer/cudnn/prefill.py of FlashInfer's release
0.7.2, which tests/real reads itself; torch/nn/attention/varlen.py of the installed torch. A call that the library would refuse, or would compute wrongly, fails
an assertion.
"""

import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from attention import reference
from torch.nn.attention import varlen

from saccade.nn.backends import compilers

HALF = (torch.float16, torch.bfloat16)
WORKSPACE_BYTES = 128 << 20
PUBLISHED_VARLEN = inspect.signature(varlen.varlen_attn)


def has_form(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Assert what a C++ function of tensors looks at."""
    assert tuple(tensor.shape) == shape, f"{tuple(tensor.shape)}, not {shape}"
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()


def has_borders(borders: torch.Tensor, count: int) -> None:
    """Assert that *borders* of *count* sequences begin at 0 and do not fall."""
    has_form(borders, (count + 1,), torch.int32)
    assert borders[0] == 0
    assert (borders.diff() >= 0).all()


def check_workspace(workspace: torch.Tensor) -> None:
    assert workspace.numel() * workspace.element_size() >= WORKSPACE_BYTES
    assert workspace.is_contiguous()
    assert workspace.data_ptr() % 16 == 0


class _Paged:
    """What both wrappers for paged caches demand and compute."""

    num_made = 0

    def _make(self, workspace: torch.Tensor, kv_layout: str) -> None:
        check_workspace(workspace)
        assert kv_layout == "NHD"
        type(self).num_made += 1
        self.num_plans = 0

    def _planned(
        self,
        qo_indptr: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        heads: tuple[int, int, int],
        page_size: int,
        dtypes: tuple[Any, Any],
        options: dict[str, Any],
    ) -> None:
        indptr, indices, last_page_len = pages
        count = len(qo_indptr) - 1
        has_borders(qo_indptr, count)
        has_borders(indptr, count)
        has_form(indices, (int(indptr[-1]),), torch.int32)
        has_form(last_page_len, (count,), torch.int32)
        assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert heads[0] % heads[1] == 0
        assert dtypes[0] in HALF
        assert dtypes[1] in (dtypes[0], torch.float8_e4m3fn)
        assert heads[2] in (64, 128, 256)
        self.heads, self.page_size, self.dtypes = heads, page_size, dtypes
        self.borders = qo_indptr.tolist()
        self.lengths = (indptr.diff() - 1) * page_size + last_page_len
        self.pages = indices.split(indptr.diff().tolist())
        # The library's window counts the tokens to the left of a query's own.
        window = None if options["window_left"] < 0 else options["window_left"] + 1
        self.options = {"scale": options["sm_scale"], "window": window, "soft_cap": options["logits_soft_cap"] or None}
        self.num_plans += 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> torch.Tensor:
        num_heads, num_kv_heads, width = self.heads
        has_form(q, (self.borders[-1], num_heads, width), self.dtypes[0])
        for cache in paged_kv_cache:
            has_form(cache, (len(cache), self.page_size, num_kv_heads, width), self.dtypes[1])
        outputs = []
        for number, (pages, length) in enumerate(zip(self.pages, self.lengths.tolist(), strict=True)):
            k, v = (
                cache[pages.long()].flatten(0, 1)[:length].double() * (1.0 if scale is None else scale)
                for cache, scale in zip(paged_kv_cache, (k_scale, v_scale), strict=True)
            )
            own = q[self.borders[number] : self.borders[number + 1]]
            outputs.append(reference(own, k, v, causal=True, **self.options))
        return torch.cat(outputs).to(q.dtype).view(len(q), num_heads, width)


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper, with the parameters that Saccade uses."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        # Only tensor cores take all groups of heads, and only FA2 splits long contexts.
        assert use_tensor_cores
        assert backend == "fa2"
        self._make(float_workspace_buffer, kv_layout)
        self.buffers = None
        if use_cuda_graph:
            self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            assert all(buffer is not None and buffer.dtype == torch.int32 for buffer in self.buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        heads, dtypes = (num_qo_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type)
        if self.buffers is not None:
            sizes = [len(buffer) for buffer in self.buffers if buffer is not None]
            assert (len(indptr), len(last_page_len)) == (sizes[0], sizes[2])
            assert len(indices) <= sizes[1]
        borders = torch.arange(len(indptr), dtype=torch.int32)
        self._planned(borders, (indptr, indices, last_page_len), heads, page_size, dtypes, options)


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """flashinfer.BatchPrefillWithPagedKVCacheWrapper, with the parameters that Saccade uses."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._make(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        assert causal
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        heads, dtypes = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type)
        self._planned(qo_indptr, pages, heads, page_size, dtypes, options)


class MLAPlanMetadata(NamedTuple):
    """flashinfer.mla.MLAPlanMetadata, in its form of borders and indices."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(cls, *args: torch.Tensor) -> "MLAPlanMetadata":
        return cls(*args)


class BatchMLAPagedAttentionWrapper:
    """flashinfer.mla.BatchMLAPagedAttentionWrapper, with the parameters that Saccade uses."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        backend: str = "auto",
        **buffers: torch.Tensor,
    ) -> None:
        check_workspace(float_workspace_buffer)
        # Only these plan again for a graph.
        assert backend in ("fa2", "fa3") if use_cuda_graph else not buffers
        assert all(buffer.dtype == torch.int32 for buffer in buffers.values())
        self.buffers = buffers
        self.num_plans = 0

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        count = len(metadata.kv_len_arr)
        has_borders(metadata.qo_indptr, count)
        has_borders(metadata.kv_indptr, count)
        for name, buffer in self.buffers.items():
            held = getattr(metadata, name)
            assert len(held) <= len(buffer) if name == "kv_indices" else len(held) == len(buffer)
        has_form(metadata.kv_indices, (int(metadata.kv_indptr[-1]),), torch.int32)
        has_form(metadata.kv_len_arr, (count,), torch.int32)
        assert (metadata.kv_indptr.diff() == -(-metadata.kv_len_arr // page_size)).all()
        assert causal
        assert q_data_type == kv_data_type
        assert q_data_type in HALF
        self.metadata, self.page_size, self.scale, self.dtype = metadata, page_size, sm_scale, q_data_type
        self.form = num_heads, head_dim_ckv + head_dim_kpe
        self.value_width = head_dim_ckv
        self.num_plans += 1

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        borders, pages, indices, lengths = (part.tolist() for part in self.metadata)
        has_form(query, (borders[-1], *self.form), self.dtype)
        has_form(kv_cache, (len(kv_cache), self.page_size, self.form[1]), self.dtype)
        outputs = []
        for number, length in enumerate(lengths):
            latents = kv_cache[indices[pages[number] : pages[number + 1]]].flatten(0, 1)[:length].unsqueeze(1)
            own = query[borders[number] : borders[number + 1]]
            outputs.append(reference(own, latents, latents[..., : self.value_width], causal=True, scale=self.scale))
        return torch.cat(outputs).to(self.dtype).view(len(query), self.form[0], self.value_width)


def cudnn_batch_prefill_with_kv_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    workspace_buffer: torch.Tensor,
    *,
    max_token_per_sequence: int,
    max_sequence_kv: int,
    actual_seq_lens_q: torch.Tensor,
    actual_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    causal: bool,
    return_lse: bool,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    batch_offsets_q: torch.Tensor | None = None,
    batch_offsets_o: torch.Tensor | None = None,
    batch_offsets_k: torch.Tensor | None = None,
    batch_offsets_v: torch.Tensor | None = None,
    batch_offsets_stats: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    is_cuda_graph_compatible: bool = False,
    backend: str | None = None,
    o_data_type: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache, for sequences without a cache."""
    check_workspace(workspace_buffer)
    assert q.dtype in HALF
    for tensor in (q, k_cache, v_cache):
        has_form(tensor, tuple(q.shape), q.dtype)
    assert isinstance(max_token_per_sequence, int)
    assert max_token_per_sequence == max_sequence_kv
    count = len(actual_seq_lens_q)
    for lengths in (actual_seq_lens_q, actual_seq_lens_kv):
        has_form(lengths, (count, 1, 1, 1), torch.int32)
        assert lengths.min() >= 0
        assert lengths.max() <= max_token_per_sequence
    assert not causal
    assert not return_lse
    outputs = torch.zeros_like(q)
    channels = q.shape[1] * q.shape[2]
    for offsets in (batch_offsets_q, batch_offsets_o, batch_offsets_k, batch_offsets_v):
        assert offsets is not None
        has_borders(offsets, count)
        assert (offsets % channels == 0).all()
    assert batch_offsets_q is not None
    starts = (batch_offsets_q // channels).tolist()
    for start, length in zip(starts, actual_seq_lens_q.flatten().tolist(), strict=False):
        part = slice(start, start + length)
        if length:
            expected = reference(q[part], k_cache[part], v_cache[part], causal=False, scale=scale)
            outputs[part] = expected.view_as(q[part]).to(q.dtype)
    return outputs, None


def varlen_attn(*args: Any, **kwargs: Any) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn, with the installed signature."""
    call = PUBLISHED_VARLEN.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    q, borders = given["query"], given["cu_seq_q"]
    assert q.dtype in HALF
    assert q.shape[2] % 8 == 0
    assert q.shape[2] <= 256
    for tensor in (q, given["key"], given["value"]):
        assert (tensor.shape, tensor.dtype) == (q.shape, q.dtype)
        assert tensor.stride(2) == 1
    has_borders(borders, len(borders) - 1)
    assert given["cu_seq_k"] is borders
    assert isinstance(given["max_q"], int)
    assert given["max_q"] == given["max_k"] >= borders.diff().max()
    assert given["window_size"] == (-1, -1)
    parts = zip(*(given[name].split(borders.diff().tolist()) for name in ("query", "key", "value")), strict=True)
    return torch.cat([reference(*part, causal=False, scale=given["scale"]) for part in parts]).view_as(q).to(q.dtype)


def empty_library(name: str) -> ModuleType:
    """Return a module that can be looked up as an installed one can."""
    library = ModuleType(name)
    library.__spec__ = ModuleSpec(name, None)
    return library


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `flashinfer` importable, and have torch find a GPU. Backends that import flashinfer are imported anew."""
    headers = dict.fromkeys((compilers.FA3_HEADER, compilers.GEMM_HEADER), Path("/usr/include"))
    tools = compilers.Toolkit(
        Path("/usr/local/cuda/bin/nvcc"), Path("/usr/local/cuda"), Path("/usr/bin/ninja"), headers
    )
    monkeypatch.setattr(compilers, "find_toolkit", lambda: tools)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    library, cudnn, mla = map(empty_library, ("flashinfer", "flashinfer.cudnn", "flashinfer.mla"))
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        setattr(library, wrapper.__name__, wrapper)
    cudnn.cudnn_batch_prefill_with_kv_cache = cudnn_batch_prefill_with_kv_cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    for part in (BatchMLAPagedAttentionWrapper, MLAPlanMetadata):
        setattr(mla, part.__name__, part)
    monkeypatch.setitem(sys.modules, "flashinfer.cudnn", cudnn)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", mla)
    for name in ("flashinfer_latents", "flashinfer_paged", "flashinfer_cudnn", "torch_varlen"):
        # Set before it is deleted, so that the module is forgotten at the end.
        monkeypatch.setitem(sys.modules, f"saccade.nn.backends.{name}", ModuleType(name))
        del sys.modules[f"saccade.nn.backends.{name}"]
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
