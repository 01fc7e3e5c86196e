"""Attention over cached latents on a GPU by FlashInfer's wrapper for MLA: all tokens of a step in one call.

Source of the arguments: flashinfer/mla/_batch_mla, release 0.7.2. The wrapper takes queries and latents as Saccade has
them, both parts of a channel vector joined. It has never run on a GPU: tests/real binds its calls to the releases' own
signatures. Shapes: N tokens, Q query heads, C width of a latent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

from saccade.nn.context import PagedLayout


class _Kind(NamedTuple):
    """The properties of layers that share a plan of FlashInfer."""

    num_heads: int
    value_width: int
    width: int
    scale: float
    dtype: torch.dtype


class LatentAttention:
    """Wrappers by the kind of layer and turn, each with the step that it is planned for; *workspace* is shared.

    With *num_rows*, they are for decodes in a CUDA graph, of that many sequences with *num_blocks* in all at most.
    """

    def __init__(
        self, workspace: Callable[[torch.device], torch.Tensor], num_rows: int = 0, num_blocks: int = 0
    ) -> None:
        self._workspace, self._num_rows, self._num_blocks = workspace, num_rows, num_blocks
        self._wrappers: dict[tuple[_Kind, int], tuple[Any, PagedLayout | None]] = {}

    def __call__(
        self,
        q_NQC: torch.Tensor,
        latents: torch.Tensor,
        layout: PagedLayout,
        blocks: torch.Tensor,
        turn: int,
        *,
        value_width: int,
        scale: float,
    ) -> torch.Tensor:
        """Attend causally to *latents* [num_blocks, block_size, C]; return [N, Q, value_width].

        *blocks* int32 are the blocks of all sequences, one after the other, on the device. *turn* is the step's.
        """
        kind = _Kind(q_NQC.shape[1], value_width, q_NQC.shape[2], scale, q_NQC.dtype)
        wrapper, planned = self._wrappers.get((kind, turn), (None, None))
        if wrapper is None:
            wrapper = BatchMLAPagedAttentionWrapper(self._workspace(q_NQC.device), **self._buffers(q_NQC.device))
        if planned is not layout:
            _plan(wrapper, kind, layout, blocks)
            self._wrappers[kind, turn] = wrapper, layout
        return wrapper.run(query=q_NQC.contiguous(), kv_cache=latents)  # type: ignore[no-any-return]

    def replan(self, layout: PagedLayout, blocks: torch.Tensor) -> None:
        """Plan every wrapper again, for the lengths of *layout* and its *blocks*."""
        for (kind, _), (wrapper, _) in self._wrappers.items():
            _plan(wrapper, kind, layout, blocks)

    def _buffers(self, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a wrapper for CUDA graphs, which copies its plan into these int32 buffers."""
        if not self._num_rows:
            return {}
        sizes = {"qo_indptr": self._num_rows + 1, "kv_indptr": self._num_rows + 1, "kv_indices": self._num_blocks,
                 "kv_len_arr": self._num_rows}  # fmt: skip
        buffers = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        # Other kernels of FlashInfer cannot plan again.
        is_hopper = torch.cuda.get_device_capability(device)[0] == 9
        return {"use_cuda_graph": True, "backend": "fa3" if is_hopper else "fa2", **buffers}


def _plan(wrapper: Any, kind: _Kind, layout: PagedLayout, blocks: torch.Tensor) -> None:
    lengths = np.array(layout.host_context_lengths, np.int32)
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(
            borders(np.array(layout.query_lengths)),
            borders(-(-lengths // layout.block_size)),
            blocks,
            torch.from_numpy(lengths),
        ),
        num_heads=kind.num_heads,
        head_dim_ckv=kind.value_width,
        head_dim_kpe=kind.width - kind.value_width,
        page_size=layout.block_size,
        causal=True,
        sm_scale=kind.scale,
        q_data_type=kind.dtype,
        kv_data_type=kind.dtype,
    )


def borders(lengths: "np.ndarray[Any, np.dtype[Any]]") -> torch.Tensor:
    """Return the borders int32 [S + 1] of S sequences of *lengths*, on the host."""
    return torch.from_numpy(np.concatenate(([0], lengths.cumsum()))).int()
