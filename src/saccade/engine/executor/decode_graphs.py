"""Replay decodes as CUDA graphs: one graph for each of a few numbers of rows, over buffers that never move.

A step's input is copied into the buffers, and padding rows fill the graph's number of rows. The attention backend reads
lengths and block tables on the device, or plans again before a replay (AttentionBackend.replan). A padding row reads
and writes the padding block and the padding row of the caches, which belong to no sequence. A step with other chunks
runs without a graph. Shapes: n rows of a step, B of a graph, M blocks of the longest table, E hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saccade.engine.executor.batch import Batch
from saccade.engine.executor.caches import Caches
from saccade.engine.executor.graphs import Capture, Compute, Graphs
from saccade.models.network import Network
from saccade.nn.context import AttentionBackend, ForwardContext, PagedLayout
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedLinear
from saccade.nn.layers import Linear
from saccade.nn.ops import FASTER


def refusal(module: nn.Module, backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the decodes of a network cannot be captured, as the rest of a sentence; None if they can.

    Experts computed one by one make the host wait for their number, and CUDA does not capture that. Quantised weights
    that no kernel multiplies are dequantised, over memory of a whole matrix, and have no graphs.
    """
    if any(isinstance(layer, Linear) and isinstance(layer.packed, QuantisedLinear) for layer in module.modules()):
        return "does not take weights in a quantised format that no kernel multiplies: leave it out for this model."
    experts = [layer for layer in module.modules() if isinstance(layer, Experts)]
    if any(layer.quantised for layer in experts):
        return "does not take experts in a quantised format: which of them a step needs is known while it runs."
    if device.type != "cuda" or not backend.captures_decodes:
        return f"needs a GPU and --attention-backend triton or flashinfer, not {backend.name} on {device.type}."
    if experts and ("experts", device.type, dtype) not in FASTER:
        return f"does not take experts in {str(dtype).removeprefix('torch.')}: give --dtype bfloat16."
    return None


def row_counts(max_rows: int) -> list[int]:
    """Return the numbers of rows that get a graph: powers of two, and *max_rows*."""
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The input of the largest graph, int64: ids, slots, lengths and rows [B], positions [3, B], tables [B, M]."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor


class DecodeGraphs:
    """Graphs of one network over *caches*, which have a padding block and row; *max_blocks* is M."""

    def __init__(
        self,
        network: Network,
        backend: AttentionBackend,
        caches: Caches,
        max_blocks: int,
        capture: Capture | None = None,
    ) -> None:
        self.by_size = Graphs(row_counts(caches.sizes.num_rows), self._make, "--no-cuda-graphs", capture)
        self._network = network
        self._backend = backend
        self._caches = caches
        most, device = caches.sizes.num_rows, network.device
        shapes = ((most,), (3, most), (most,), (most, max_blocks), (most,), (most,))
        self._buffers = _Buffers(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Return the hidden states [n, E] of a step; None if the step must run without a graph."""
        layout = batch.layout
        num_rows, num_blocks = layout.block_tables.shape
        is_small = num_rows <= self.by_size.sizes[-1] and num_blocks <= self._buffers.tables.shape[1]
        if layout.num_decodes < num_rows or batch.media_rows is not None or not is_small:
            return None
        # Before the copies: the capture of another size pads all its rows.
        (count, plan), graph = self.by_size.of(num_rows)
        buffers = self._buffers
        buffers.input_ids[:num_rows].copy_(batch.input_ids)
        buffers.positions[:, :num_rows].copy_(batch.positions)
        buffers.slots[:num_rows].copy_(layout.slot_mapping)
        buffers.tables[:num_rows, :num_blocks].copy_(layout.block_tables)
        buffers.lengths[:num_rows].copy_(layout.context_lengths)
        buffers.rows[:num_rows].copy_(layout.rows)
        self._pad(num_rows, count)
        lengths = (*layout.host_context_lengths, *(1,) * (count - num_rows))
        self._backend.replan(plan, self._layout(lengths))
        graph.replay()
        # A copy, since the next replay may come before tokens were sampled from these.
        return graph.output[:num_rows].clone()

    def _pad(self, start: int, stop: int) -> None:
        """Make rows from *start* up to *stop* touch only the padding block and row."""
        sizes, buffers = self._caches.sizes, self._buffers
        for buffer, value in (
            (buffers.input_ids[start:stop], 0),
            (buffers.positions[:, start:stop], 0),
            (buffers.slots[start:stop], sizes.num_blocks * sizes.block_size),
            (buffers.tables[start:stop, :1], sizes.num_blocks),
            (buffers.lengths[start:stop], 1),
            (buffers.rows[start:stop], sizes.num_rows),
        ):
            buffer.fill_(value)

    def _layout(self, lengths: tuple[int, ...]) -> PagedLayout:
        """Return the layout of the buffers' first rows, as many as there are *lengths* of contexts."""
        count, buffers = len(lengths), self._buffers
        return PagedLayout(
            slot_mapping=buffers.slots[:count],
            block_tables=buffers.tables[:count],
            context_lengths=buffers.lengths[:count],
            query_lengths=(1,) * count,
            host_context_lengths=lengths,
            num_decodes=count,
            block_size=self._caches.sizes.block_size,
            rows=buffers.rows[:count],
        )

    def _make(self, count: int) -> tuple[tuple[int, Any], Compute]:
        """Return *count* and the plan, and a call of the network over the first *count* rows of the buffers."""
        self._pad(0, count)
        buffers, layout = self._buffers, self._layout((1,) * count)
        plan = self._backend.plan_captured(layout, self._network.dtype)
        context = ForwardContext(buffers.positions[:, :count], layout, self._caches.layers, self._backend, plan)
        return (count, plan), lambda: self._network(buffers.input_ids[:count], context)
