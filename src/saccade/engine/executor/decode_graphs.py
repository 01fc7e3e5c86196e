"""Replay decodes as CUDA graphs: one graph for each of a few numbers of rows, over buffers that never move.

A step's input is copied into the buffers, and padding rows fill the graph's number of rows. The attention backend reads
lengths and block tables on the device, or plans again before a replay (AttentionBackend.replan). A padding row reads
and writes the padding block and the padding row of the caches, which belong to no sequence. A step with a chunk that is
not a decode runs without a graph. Shapes: n rows of a step, B of a graph, M blocks of the longest table, E hidden size.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from saccade.engine.executor.batch import Batch
from saccade.engine.executor.caches import Caches
from saccade.engine.executor.graphs import Capture, Compute, Graphs
from saccade.models.network import Network
from saccade.models.spec import blocks_seen, window_of
from saccade.nn.context import AttentionBackend, ForwardContext, PagedLayout
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedLinear
from saccade.nn.layers import Linear
from saccade.nn.ops import FASTER


def refusal(module: nn.Module, backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a network's decodes cannot be captured, as the rest of a sentence; None if they can.

    If experts are computed one by one, the host must wait to learn which ones a step needs, and CUDA cannot capture
    that. Quantised weights that no kernel multiplies have no graphs: dequantising takes the memory of a whole matrix.
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


class _Context(NamedTuple):
    """Slots and lengths [B] and tables [B, M], int64, of layers that have *num_blocks* and a padding block."""

    slots: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The largest graph's input: int64 ids [B] and positions [3, B], and int32 rows [B].

    *contexts* has one for layers that attend to all tokens and, if there are layers with a window, one for those.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    contexts: tuple[_Context, ...]


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
        sizes, window = caches.sizes, window_of(network.spec.kv_specs)
        pools = [(max_blocks, sizes.num_blocks)]
        if window is not None:
            pools.append((blocks_seen(window, sizes.block_size) + 1, sizes.num_window_blocks))
        zeros = partial(torch.zeros, dtype=torch.int64, device=network.device)
        most = sizes.num_rows
        contexts = tuple(_Context(zeros(most), zeros(most), zeros(most, width), count) for width, count in pools)
        self._buffers = _Buffers(zeros(most), zeros(3, most), zeros(most, dtype=torch.int32), contexts)

    def run_step(self, batch: Batch) -> torch.Tensor | None:
        """Return the hidden states [n, E] of a step; None if the step must run without a graph."""
        layout, buffers = batch.layout, self._buffers
        num_rows, num_blocks = layout.block_tables.shape
        is_small = num_rows <= self.by_size.sizes[-1] and num_blocks <= buffers.contexts[0].tables.shape[1]
        if layout.num_decodes < num_rows or batch.media_rows is not None or not is_small:
            return None
        # Before the copies: the capture of another size pads all its rows.
        (count, plans), graph = self.by_size.graph_of_size(num_rows)
        buffers.input_ids[:num_rows].copy_(batch.input_ids)
        buffers.positions[:, :num_rows].copy_(batch.positions)
        buffers.rows[:num_rows].copy_(layout.rows)
        self._pad(num_rows, count)
        layouts = (layout,) if batch.windowed is None else (layout, batch.windowed)
        for plan, context, own in zip(plans, buffers.contexts, layouts, strict=True):
            context.slots[:num_rows].copy_(own.slot_mapping)
            context.tables[:num_rows, : own.block_tables.shape[1]].copy_(own.block_tables)
            context.lengths[:num_rows].copy_(own.context_lengths)
            lengths = (*own.host_context_lengths, *(1,) * (count - num_rows))
            self._backend.replan(plan, self._layout(context, lengths))
        graph.replay()
        # A copy, since the next replay may come before tokens were sampled from these.
        return graph.output[:num_rows].clone()

    def _pad(self, start: int, stop: int) -> None:
        """Make rows from *start* up to *stop* touch only the padding block and row."""
        sizes, buffers = self._caches.sizes, self._buffers
        buffers.input_ids[start:stop] = 0
        buffers.positions[:, start:stop] = 0
        buffers.rows[start:stop] = sizes.num_rows
        for context in buffers.contexts:
            context.slots[start:stop] = context.num_blocks * sizes.block_size
            context.tables[start:stop, :1] = context.num_blocks
            context.lengths[start:stop] = 1

    def _layout(self, context: _Context, lengths: tuple[int, ...]) -> PagedLayout:
        """Return the layout of the first rows of *context*, as many as there are *lengths*."""
        count = len(lengths)
        return PagedLayout(
            slot_mapping=context.slots[:count],
            block_tables=context.tables[:count],
            context_lengths=context.lengths[:count],
            query_lengths=(1,) * count,
            host_context_lengths=lengths,
            num_decodes=count,
            block_size=self._caches.sizes.block_size,
            rows=self._buffers.rows[:count],
        )

    def _make(self, count: int) -> tuple[tuple[int, list[Any]], Compute]:
        """Return *count* and the plans, and a call of the network over the first *count* rows of the buffers."""
        self._pad(0, count)
        buffers, backend = self._buffers, self._backend
        layouts = [self._layout(context, (1,) * count) for context in buffers.contexts]
        plans = [backend.plan_captured(layout, self._network.dtype) for layout in layouts]
        context, *windowed = (
            ForwardContext(buffers.positions[:, :count], layout, self._caches.layers, backend, plan)
            for layout, plan in zip(layouts, plans, strict=True)
        )
        if windowed:
            context = replace(context, windowed=windowed[0])
        return (count, plans), lambda: self._network(buffers.input_ids[:count], context)
