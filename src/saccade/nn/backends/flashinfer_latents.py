"""Attention over cached latents on a GPU by FlashInfer's wrapper for MLA, for all tokens of a step in one call.

Source of the arguments: flashinfer/mla/_batch_mla, release 0.7.2. The wrapper takes queries and latents as Saccade has
them, with both parts of a channel vector joined. It has never run on a GPU; tests/real checks its calls against the
releases' own signatures.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

from saccade.nn.backends.flashinfer_wrappers import borders, graph_buffers
from saccade.nn.context import PagedLayout


class LatentKind(NamedTuple):
    """The properties that layers must share to use one FlashInfer plan."""

    num_heads: int
    value_width: int
    width: int
    scale: float
    dtype: torch.dtype


class LatentStep(NamedTuple):
    """A step over latents. *blocks* int32, on the device, are those of all sequences, one after the other."""

    layout: PagedLayout
    blocks: torch.Tensor


def new_latent_wrapper(workspace: torch.Tensor, num_rows: int = 0, num_blocks: int = 0) -> Any:
    """Return a wrapper. With *num_rows*, it is for decodes in a CUDA graph with at most *num_blocks* blocks in all."""
    if not num_rows:
        return BatchMLAPagedAttentionWrapper(workspace)
    buffers = graph_buffers(
        workspace.device, qo_indptr=num_rows + 1, kv_indptr=num_rows + 1, kv_indices=num_blocks, kv_len_arr=num_rows
    )
    # Other kernels of FlashInfer cannot plan again.
    is_hopper = torch.cuda.get_device_capability(workspace.device)[0] == 9
    return BatchMLAPagedAttentionWrapper(workspace, backend="fa3" if is_hopper else "fa2", **buffers)


def plan_latents(wrapper: Any, kind: LatentKind, step: LatentStep) -> None:
    """Plan *wrapper* for the layers of *kind*."""
    layout, lengths = step.layout, np.array(step.layout.host_context_lengths, np.int32)
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(
            borders(np.array(layout.query_lengths)),
            borders(-(-lengths // layout.block_size)),
            step.blocks,
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
