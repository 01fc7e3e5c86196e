"""A loaded model, random images, and the two calls that are compared: encode images, decode one token a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import Chunk, EncodeJob, EncoderInput, RowStart, StepInput, TableChange
from saccade.engine.executor.caches import Caches, CacheSizes
from saccade.engine.executor.decode_graphs import DecodeGraphs
from saccade.engine.executor.encoder import Encoder
from saccade.engine.executor.encoder_graphs import EncoderGraphs
from saccade.engine.executor.execution import Execution, prepare
from saccade.engine.executor.graphs import Capture
from saccade.engine.executor.loader import LoadedModel, load_model
from saccade.engine.executor.memory import block_format
from saccade.engine.executor.model_runner import ModelRunner
from saccade.models.spec import MediaShape
from saccade.nn.context import AttentionBackend, VisionAttentionBackend
from saccade.protocol.request import SamplingParams

BLOCKS_OF_ROW = 4
PROMPT_TOKENS = 40


@dataclass(frozen=True)
class Subject:
    """A model and its images; *capture* captures graphs."""

    config: EngineConfig
    model: LoadedModel
    execution: Execution
    images: tuple[EncoderInput, ...]
    capture: Capture | None = None

    def job(self, count: int) -> EncodeJob:
        """Return the first *count* images."""
        return EncodeJob(1, self.images[:count])

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
        metadata, _ = network.prepare([MediaShape(image.grid) for image in chosen], backend)
        return lambda: network.encode(pixels, metadata)

    def decoding(self, backend: AttentionBackend, num_rows: int, *, with_graphs: bool) -> Callable[[], torch.Tensor]:
        """Return a call that decodes one token of each row behind a prompt, and returns hidden states [rows, E]."""
        network, config = self.model.network, self.config
        sizes = CacheSizes(num_rows * BLOCKS_OF_ROW, config.block_size, num_rows, 0, num_padding=1)
        caches = Caches(network.spec.kv_specs, sizes, network.dtype, network.device, block_format(config, self.model))
        runner = ModelRunner(network, replace(self.execution, backend=backend, encoder_graphs=None), caches)
        if with_graphs:
            runner.graphs = DecodeGraphs(network, backend, caches, BLOCKS_OF_ROW, self.capture)
        first = _prompts(num_rows)
        runner.update(first)
        runner.forward(first, encodes_in_background=False)
        step = StepInput(2, chunks=tuple(Chunk(row, PROMPT_TOKENS, 1, (7,), draws=True) for row in range(num_rows)))

        def decode() -> torch.Tensor:
            hidden = runner.forward(step, encodes_in_background=False).hidden
            if hidden is None:
                raise RuntimeError("a step with chunks gave no hidden states")
            return hidden

        return decode


def load(config: EngineConfig, patches: Sequence[int], capture: Capture | None = None) -> Subject:
    """Load a model, with a random square image for each number of *patches*. Raises StartupError."""
    model = load_model(config, lambda *_: None)
    spec, draw = model.network.spec, np.random.default_rng(0)
    grids = [spec.square_grid(count) for count in patches]
    pixels = [draw.integers(0, 256, prod(spec.pixel_shape(grid)), np.uint8).tobytes() for grid in grids]
    images = tuple(
        EncoderInput(number, "image", grid, None, content)
        for number, (grid, content) in enumerate(zip(grids, pixels, strict=True))
    )
    return Subject(config, model, prepare(config, model), images, capture)


def _prompts(num_rows: int) -> StepInput:
    """Return a step that computes a prompt of random text in each row."""
    draw, sampling = np.random.default_rng(1), SamplingParams(max_tokens=9, temperature=0)
    prompts = [tuple(draw.integers(0, 100, PROMPT_TOKENS).tolist()) for _ in range(num_rows)]
    return StepInput(
        1,
        started=tuple(RowStart(row, row, sampling, 0) for row in range(num_rows)),
        tables=tuple(
            TableChange(row, 0, tuple(range(row * BLOCKS_OF_ROW, (row + 1) * BLOCKS_OF_ROW))) for row in range(num_rows)
        ),
        chunks=tuple(Chunk(row, 0, PROMPT_TOKENS, ids, draws=True) for row, ids in enumerate(prompts)),
    )
