"""Replay the vision encoder as CUDA graphs: one graph for each of a few budgets, which are numbers of patches.

Images are packed up to a budget, and a padding image takes the remaining patches. It is a separate sequence, to which
no other patch attends. The pixels and the network's metadata are copied into the graph's buffers. Sequences without
patches are added up to the graph's number of sequences, and the attention backend must read the sequences' borders on
the device (VisionAttentionBackend.captures_packed). Images that do not fit run without a graph.

Shapes: B bytes of pixels, U tokens, W width of features.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Ordered
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from saccade.engine.executor.graphs import Capture, Compute, Graphs
from saccade.models.network import Network
from saccade.models.spec import MediaShape
from saccade.nn.context import PackedLayout, VisionAttentionBackend
from saccade.nn.layerwise import complete

LEAST_BUDGET = 256
MAX_IMAGES = 64
"""The images of one replay, with the padding image. Launches of attention grow with it."""


class _Input(NamedTuple):
    """The buffers of a graph: bytes and the network's metadata."""

    pixels_B: torch.Tensor
    metadata: Any


def refusal(network: Network, backend: VisionAttentionBackend, cuts_encoder: bool) -> str | None:
    """Return why the vision encoder of *network* cannot be captured; None if it can."""
    if network.device.type != "cuda":
        return "they need a GPU"
    if network.spec.padding_grid(unit(network)) is None:
        return "images of this model consist of whole views, which cannot fill a budget"
    if not backend.captures_packed:
        return f"{backend.name} depends on lengths that the host knows"
    if cuts_encoder:
        return "the ranks sum within the encoder (`--mm-encoder-tp-mode data` does not)"
    return None


def unit(network: Network) -> int:
    """Return how many patches the smallest image has; every image has a multiple of that."""
    return network.spec.encode_cost(network.spec.square_grid(0))


def budgets(most: int, unit: int) -> list[int]:
    """Return the budgets up to *most* patches, ascending multiples of *unit*: about powers of two, and *most*."""
    sizes = [most]
    power = LEAST_BUDGET
    while power < most:
        sizes.append(power)
        power *= 2
    return sorted({max(1, size // unit) * unit for size in sizes})


def packs(costs: Ordered[int], most: int, max_images: int) -> tuple[list[list[int]], list[int]]:
    """Return groups of images, by index, of at most *most* patches together, and the images that are larger.

    The smallest images come first. A group leaves room for the padding image.
    """
    groups: list[list[int]] = []
    used = most
    for index in sorted(range(len(costs)), key=lambda index: costs[index]):
        if costs[index] > most:
            continue
        if not groups or used + costs[index] > most or len(groups[-1]) == max_images - 1:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += costs[index]
    return groups, [index for index, cost in enumerate(costs) if cost > most]


class EncoderGraphs:
    """Graphs of the vision encoder of *network*, for up to *most* patches. `refusal` must return None for it."""

    def __init__(
        self, network: Network, backend: VisionAttentionBackend, most: int, capture: Capture | None = None
    ) -> None:
        self._unit = unit(network)
        self.by_size = Graphs(budgets(most, self._unit), self._make, "--no-mm-encoder-cuda-graph", capture)
        self._network = network
        self._backend = backend

    def packs(self, costs: Ordered[int]) -> tuple[list[list[int]], list[int]]:
        """Return the groups of images that a graph may encode, by index, and the images that none can encode."""
        return packs(costs, self.by_size.sizes[-1], MAX_IMAGES)

    def run_images(self, pixels_B: torch.Tensor, items: Ordered[MediaShape]) -> torch.Tensor | None:
        """Return the features [U, W] of images within the largest budget. The next replay overwrites them.

        Return None if their metadata does not fit into the graph's buffers.
        """
        spec = self._network.spec
        num_patches = sum(spec.encode_cost(item.grid) for item in items)
        budget = next(size for size in self.by_size.sizes if size >= num_patches)
        added = [self._padding(budget - num_patches)] if budget > num_patches else []
        metadata = self._network.prepare([*items, *added], self._backend)
        buffers, graph = self.by_size.graph_of_size(budget)
        if not _fits(metadata, buffers.metadata):
            return None
        _fill(buffers.metadata, metadata)
        buffers.pixels_B[: len(pixels_B)].copy_(pixels_B)
        graph.replay()
        return graph.output[: sum(spec.item_tokens(item.grid, item.original_size) for item in items)]

    def _make(self, budget: int) -> tuple[_Input, Compute]:
        network, spec = self._network, self._network.spec
        num_bytes = prod(spec.pixel_shape(self._padding(budget).grid))
        pixels_B = torch.zeros(num_bytes, dtype=torch.uint8, device=network.device)
        metadata = _buffers([network.prepare(items, self._backend) for items in self._extremes(budget)])
        return _Input(pixels_B, metadata), lambda: complete(network.encode(pixels_B, metadata))

    def _extremes(self, budget: int) -> Iterator[list[MediaShape]]:
        """Yield lists of images with *budget* patches in all: some with the longest sequences, one with the most."""
        yield [self._padding(budget)]
        square = self._network.spec.square_grid(budget)
        rest = budget - self._network.spec.encode_cost(square)
        yield [MediaShape(square), *([self._padding(rest)] if rest else [])]
        count = min(MAX_IMAGES, budget // self._unit)
        part = budget // self._unit // count * self._unit
        yield [*[self._padding(part)] * (count - 1), self._padding(budget - part * (count - 1))]

    def _padding(self, num_patches: int) -> MediaShape:
        grid = self._network.spec.padding_grid(num_patches)
        if grid is None:
            raise ValueError(f"no image has {num_patches} patches")
        return MediaShape(grid)


def _leaves(metadata: Any) -> Iterator[Any]:
    """Yield the tensors, layouts and host values of nested dataclasses."""
    if is_dataclass(metadata) and not isinstance(metadata, PackedLayout):
        for field in fields(metadata):
            yield from _leaves(getattr(metadata, field.name))
    else:
        yield metadata


def _buffers(metadata: Ordered[Any]) -> Any:
    """Return the first of *metadata*, which all have the same structure, with layouts that have room for all."""
    first = metadata[0]
    if isinstance(first, PackedLayout):
        return _layout_buffer(metadata)
    if not is_dataclass(first):
        return first
    parts = {field.name: [getattr(one, field.name) for one in metadata] for field in fields(first)}
    return replace(first, **{name: _buffers(values) for name, values in parts.items()})  # type: ignore[type-var]


def _layout_buffer(layouts: Ordered[PackedLayout]) -> PackedLayout:
    """Return the first of *layouts*, extended by sequences without patches to the largest number of sequences."""
    num_sequences = max(len(layout.sequence_lengths) for layout in layouts)
    lengths = layouts[0].sequence_lengths
    borders = layouts[0].cu_seqlens
    last = borders[-1:].expand(num_sequences - len(lengths))
    return PackedLayout(
        torch.cat((borders, last)),
        max(layout.max_seqlen for layout in layouts),
        lengths + (0,) * (num_sequences - len(lengths)),
    )


def _fits(metadata: Any, buffers: Any) -> bool:
    """Return whether `_fill` can copy all of *metadata* into *buffers*."""
    return all(_leaf_fits(*pair) for pair in zip(_leaves(metadata), _leaves(buffers), strict=True))


def _leaf_fits(leaf: Any, buffer: Any) -> bool:
    if isinstance(leaf, PackedLayout):
        is_few = len(leaf.sequence_lengths) <= len(buffer.sequence_lengths)
        return is_few and leaf.max_seqlen <= buffer.max_seqlen
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype) == (buffer.shape, buffer.dtype)
    return leaf is buffer or bool(leaf == buffer)


def _fill(buffers: Any, metadata: Any) -> None:
    """Copy tensors and borders; borders after the last sequence repeat the last border."""
    for buffer, leaf in zip(_leaves(buffers), _leaves(metadata), strict=True):
        if isinstance(leaf, PackedLayout):
            num_borders = len(leaf.cu_seqlens)
            buffer.cu_seqlens[:num_borders].copy_(leaf.cu_seqlens)
            buffer.cu_seqlens[num_borders:].fill_(sum(leaf.sequence_lengths))
        elif isinstance(leaf, torch.Tensor):
            buffer.copy_(leaf)
