"""A loaded model, random images, and the calls that are compared and timed: encode images, compute prompts, decode."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import (
    Chunk,
    EncoderInput,
    RowCounts,
    RowStart,
    SamplingInput,
    StepInput,
    StepOutput,
    TableChange,
)
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.engine.executor.decode_graphs import DecodeGraphs
from saccade.engine.executor.encoder import Encoder
from saccade.engine.executor.encoder_graphs import EncoderGraphs
from saccade.engine.executor.execution import Execution, prepare_execution
from saccade.engine.executor.graphs import Capture, Captured, Compute
from saccade.engine.executor.loader import LoadedModel, load_model
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.executor.memory import block_format
from saccade.engine.executor.model_runner import ModelRunner
from saccade.models.spec import Grid, MediaShape, ModelSpec
from saccade.nn.context import AttentionBackend, KvCache, VisionAttentionBackend
from saccade.nn.layerwise import complete
from saccade.protocol.request import SamplingParams

PROMPT_TOKENS = 40
GREEDY = SamplingParams(max_tokens=9, temperature=0)


@dataclass(frozen=True)
class Subject:
    """A model and its images; *capture* captures graphs."""

    config: EngineConfig
    model: LoadedModel
    execution: Execution
    images: tuple[EncoderInput, ...]
    capture: Capture | None = None

    def encoder(self, backend: VisionAttentionBackend, *, with_graphs: bool) -> Encoder:
        """Return the vision encoder; its graphs hold all images together."""
        network, graphs = self.model.network, None
        if with_graphs:
            most = sum(network.spec.encode_cost(image.grid) for image in self.images)
            graphs = EncoderGraphs(network, backend, most, self.capture)
        return Encoder(network, backend, self.model.ranks, graphs)

    def prepared(self, backend: VisionAttentionBackend, count: int) -> Callable[[], torch.Tensor]:
        """Return a call that encodes the first *count* images, whose input is on the device."""
        network, chosen = self.model.network, self.images[:count]
        joined = bytearray(b"").join(image.pixels for image in chosen)
        pixels = torch.frombuffer(joined, dtype=torch.uint8).to(network.device)
        metadata = network.prepare([MediaShape(image.grid) for image in chosen], backend)
        return lambda: complete(network.encode(pixels, metadata))

    def rows(
        self, backend: AttentionBackend, num_rows: int, num_tokens: int, sampling: SamplingParams = GREEDY
    ) -> "Rows":
        """Return *num_rows* rows with caches for *num_tokens* each, and one more for graphs."""
        network, config = self.model.network, self.config
        num_blocks = -(-num_tokens // config.block_size)
        total = num_rows * num_blocks
        sizes = CacheSizes(total, config.block_size, num_rows, 0, num_padding=1, num_window_blocks=total)
        caches = Caches(network.spec.kv_specs, sizes, network.dtype, network.device, block_format(config, self.model))
        runner = ModelRunner(network, replace(self.execution, backend=backend, encoder_graphs=None), caches)
        rows = Rows(LocalExecutor(runner), num_rows, num_blocks, self.capture)
        rows.start(sampling)
        return rows

    def decoding(self, backend: AttentionBackend, num_rows: int, *, with_graphs: bool) -> Callable[[], torch.Tensor]:
        """Return a call that decodes one token of each row after a prompt, and returns hidden states [rows, E]."""
        rows = self.rows(backend, num_rows, PROMPT_TOKENS + 1)
        if with_graphs:
            rows.use_graphs()
        runner = rows.executor.runner
        draw = np.random.default_rng(1)
        prompts = [tuple(draw.integers(0, 100, PROMPT_TOKENS).tolist()) for _ in range(num_rows)]
        first = StepInput(2, chunks=tuple(Chunk(row, 0, PROMPT_TOKENS, ids) for row, ids in enumerate(prompts)))
        runner.forward(first)
        step = StepInput(3, chunks=rows.decodes(PROMPT_TOKENS))

        def decode() -> torch.Tensor:
            hidden = runner.forward(step).hidden
            if hidden is None:
                raise RuntimeError("a step with chunks gave no hidden states")
            return hidden

        return decode


class Rows:
    """An executor whose rows have all their blocks."""

    def __init__(self, executor: LocalExecutor, num_rows: int, num_blocks: int, capture: Capture | None) -> None:
        self.executor, self.num_rows, self.num_blocks = executor, num_rows, num_blocks
        self._capture = capture
        self._number = 0

    def start(self, sampling: SamplingParams) -> None:
        """Start the rows, which sample with *sampling*."""
        rows, blocks = range(self.num_rows), self.num_blocks
        self.executor.runner.update(
            StepInput(
                1,
                started=tuple(RowStart(row, row, sampling, 0) for row in rows),
                tables=tuple(
                    TableChange(row, 0, tuple(range(row * blocks, (row + 1) * blocks)), in_window)
                    for row in rows
                    for in_window in (False, True)
                ),
            )
        )

    def fill(self) -> None:
        """Fill the caches with random keys and values, in place of prompts."""
        for layer in self.executor.runner.caches.layers:
            if isinstance(layer, KvCache):
                layer.keys.normal_()
                layer.values.normal_()

    def use_graphs(self) -> None:
        """Capture decodes as CUDA graphs from now on."""
        runner = self.executor.runner
        runner.graphs = DecodeGraphs(runner.network, runner.backend, runner.caches, self.num_blocks, self._capture)

    def decodes(self, context: int) -> tuple[Chunk, ...]:
        """Return chunks of one token after *context* tokens of each row."""
        return tuple(Chunk(row, context, 1, (7,), draws=True) for row in range(self.num_rows))

    def step(self, chunks: tuple[Chunk, ...], uniforms: bool = False, counts: tuple[RowCounts, ...] = ()) -> StepOutput:
        """Compute *chunks* and draw; with *uniforms* at random."""
        self.launch(chunks, uniforms, counts)
        return self.executor.collect_output()

    def launch(self, chunks: tuple[Chunk, ...], uniforms: bool = False, counts: tuple[RowCounts, ...] = ()) -> None:
        """Launch a step; self.executor collects it."""
        self._number += 1
        numbers = (0.5,) * len(chunks) if uniforms else ()
        sampling = SamplingInput(self._number, uniforms=numbers, counts=counts)
        self.executor.launch(StepInput(self._number, chunks=chunks), sampling)


def again(compute: Compute) -> Captured:
    """Capture by keeping the call, for a rehearsal without CUDA."""
    output = compute()
    return Captured(output, lambda: output.copy_(compute()))


def grid_of(spec: ModelSpec, patches: int) -> Grid:
    """Return the grid of an image of *patches*: a square, else a strip, else a smaller square."""
    square = spec.square_grid(patches)
    return square if spec.encode_cost(square) == patches else spec.padding_grid(patches) or square


def load(config: EngineConfig, patches: Sequence[int], capture: Capture | None = None) -> Subject:
    """Load a model, with a random image for each number of *patches*. Raises StartupError."""
    return subject_of(config, load_model(config, lambda *_: None), patches, capture)


def subject_of(
    config: EngineConfig, model: LoadedModel, patches: Sequence[int], capture: Capture | None = None
) -> Subject:
    """Choose how to compute a loaded model. Raises StartupError."""
    spec, draw = model.network.spec, np.random.default_rng(0)
    grids = [grid_of(spec, count) for count in patches]
    pixels = [draw.integers(0, 256, prod(spec.pixel_shape(grid)), np.uint8).tobytes() for grid in grids]
    images = tuple(
        EncoderInput(number, "image", grid, None, content)
        for number, (grid, content) in enumerate(zip(grids, pixels, strict=True))
    )
    return Subject(config, model, prepare_execution(config, model), images, capture)
