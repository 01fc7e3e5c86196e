"""Replay decodes as CUDA graphs: one graph for each of a few numbers of rows, over buffers that never move.

A graph repeats the kernels of one call with the same addresses and sizes. So a step's input is copied into the graph's
buffers, padding rows fill the graph's number of rows, and the attention backend must read lengths and block tables only
on the device (AttentionBackend.captures_decodes). A padding row reads and writes the padding block and the padding row
of the caches, which belong to no sequence. A step with other chunks runs without a graph.

CUDA has never captured these graphs: tests replace `capture` by a function that calls again. Shapes: n rows of a step,
B of a graph, M blocks of the longest table, E hidden size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from saccade.engine.executor.batch import Batch
from saccade.engine.executor.caches import Caches
from saccade.models.network import Network
from saccade.nn.context import AttentionBackend, ForwardContext, PagedLayout
from saccade.nn.experts import Experts
from saccade.nn.formats.quantised import QuantisedLinear
from saccade.nn.layers import Linear
from saccade.nn.ops import FASTER

Compute = Callable[[], torch.Tensor]


class Captured(NamedTuple):
    """A call that `replay` repeats; its result is then in *output*."""

    output: torch.Tensor
    replay: Callable[[], None]


Capture = Callable[[Compute], Captured]


class CudaCapture:
    """Captures calls in CUDA graphs that share one pool of memory.

    Replaying another of the graphs overwrites a call's output, so read or copy it before. Capture the call that needs
    the most memory first: the pool then does not grow.
    """

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, compute: Compute) -> Captured:
        """Capture a call. A call before it compiles and allocates, so that the capture does not."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = compute()
        return Captured(output, graph.replay)


def refusal(module: nn.Module, backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the decodes of a network cannot be captured, as the rest of a sentence; None if they can.

    Experts computed one by one make the host wait for their number, and CUDA does not capture that. Quantised weights
    are dequantised by several kernels each, over memory of a whole matrix, and have no graphs yet.
    """
    if any(isinstance(layer, Linear) and isinstance(layer.packed, QuantisedLinear) for layer in module.modules()):
        return "does not take weights in a quantised format: leave it out for this model."
    experts = [layer for layer in module.modules() if isinstance(layer, Experts)]
    if any(layer.quantised for layer in experts):
        return "does not take experts in a quantised format: which of them a step needs is known while it runs."
    if device.type != "cuda" or not backend.captures_decodes:
        return f"needs a GPU and --attention-backend triton, not {backend.name} on {device.type}."
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
        self.row_counts = row_counts(caches.sizes.num_rows)
        self._network = network
        self._backend = backend
        self._caches = caches
        self._capture = capture or CudaCapture()
        self._captured: dict[int, Captured] = {}
        most, device = caches.sizes.num_rows, network.device
        shapes = ((most,), (3, most), (most,), (most, max_blocks), (most,), (most,))
        self._buffers = _Buffers(*(torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes))

    def prepare(self) -> Iterable[tuple[int, int]]:
        """Capture all graphs, the largest first; yield how many are done, and how many there are."""
        for number, count in enumerate(reversed(self.row_counts)):
            yield number, len(self.row_counts)
            self._pad(0, count)
            self._graph(count)

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Return the hidden states [n, E] of a step; None if the step must run without a graph."""
        layout = batch.layout
        num_rows, num_blocks = layout.block_tables.shape
        is_small = num_rows <= self.row_counts[-1] and num_blocks <= self._buffers.tables.shape[1]
        if layout.num_decodes < num_rows or batch.media_rows is not None or not is_small:
            return None
        count = next(count for count in self.row_counts if count >= num_rows)
        buffers = self._buffers
        buffers.input_ids[:num_rows].copy_(batch.input_ids)
        buffers.positions[:, :num_rows].copy_(batch.positions)
        buffers.slots[:num_rows].copy_(layout.slot_mapping)
        buffers.tables[:num_rows, :num_blocks].copy_(layout.block_tables)
        buffers.lengths[:num_rows].copy_(layout.context_lengths)
        buffers.rows[:num_rows].copy_(layout.rows)
        self._pad(num_rows, count)
        graph = self._graph(count)
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

    @torch.inference_mode()
    def _graph(self, count: int) -> Captured:
        if count not in self._captured:
            self._captured[count] = self._capture(self._compute(count))
        return self._captured[count]

    def _compute(self, count: int) -> Compute:
        """Return a call of the network over the first *count* rows of the buffers."""
        buffers = self._buffers
        layout = PagedLayout(
            slot_mapping=buffers.slots[:count],
            block_tables=buffers.tables[:count],
            context_lengths=buffers.lengths[:count],
            query_lengths=(1,) * count,
            host_context_lengths=(1,) * count,
            num_decodes=count,
            block_size=self._caches.sizes.block_size,
            rows=buffers.rows[:count],
        )
        plan = self._backend.plan(layout, self._network.dtype)
        context = ForwardContext(buffers.positions[:, :count], layout, self._caches.layers, self._backend, plan)
        return lambda: self._network(buffers.input_ids[:count], context)
