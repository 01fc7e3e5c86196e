"""The vision tower compiled by OpenVINO beside our own, alone and in whole requests.

    python -m benchmarks.engine.shape_2b DIR
    pip install openvino nncf
    python -m benchmarks.engine.openvino_tower DIR convert IR
    python -m benchmarks.engine.openvino_tower DIR tower IR
    python -m benchmarks.engine.openvino_tower DIR requests IR

DIR holds a Qwen3-VL. *convert* traces our own module in float32, and writes it to the folder IR in OpenVINO's form:
plain, with int8 weights, and with int8 weights and activations (calibrated with noise). *tower* encodes an image of
each size in turn by each engine, and prints the median seconds and the errors beside float32. *requests* starts an
engine in int8, and answers whole requests in turn with its own tower and with OpenVINO's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from benchmarks.engine.vision_backends import ROWS, measured
from saccade.engine import startup
from saccade.engine.config import EngineConfig
from saccade.engine.executor.loader import empty_network
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.executor.malloc import keep_freed_memory
from saccade.models.backbones.merging_tower import BlockMetadata, LearnedMetadata
from saccade.models.files import read_model_files
from saccade.models.spec import Grid
from saccade.nn.backends import AUTO, Workload, load_vision_backend
from saccade.nn.context import Heads, PackedLayout, VisionAttentionBackend
from saccade.nn.formats.int8 import rounded_rows
from saccade.nn.layers import Linear, finish, use_operations
from saccade.nn.layerwise import Layerwise, complete
from saccade.nn.openvino import openvino
from saccade.nn.ops import PLAIN, resolve

PATCH, PIXEL_VALUES = 16, 768
TRACED_GRID = (1, 28, 20)
CALIBRATION_IMAGES = 4
SIZES = ((448, 448), (1280, 960))
COMPILED: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "OpenVINO, float32": ("plain", {"INFERENCE_PRECISION_HINT": "f32"}),
        "OpenVINO, bfloat16": ("plain", {"INFERENCE_PRECISION_HINT": "bf16"}),
        "OpenVINO, int8 weights, bfloat16": ("weights", {"INFERENCE_PRECISION_HINT": "bf16"}),
        "OpenVINO, int8 weights, rounds activations": ("weights", {"INFERENCE_PRECISION_HINT": "f32"}),
        "OpenVINO, int8, bfloat16": ("int8", {"INFERENCE_PRECISION_HINT": "bf16"}),
        "OpenVINO, int8, float32": ("int8", {"INFERENCE_PRECISION_HINT": "f32"}),
    }
)
"""The file and the settings of each of OpenVINO's forms."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Patches [P, C], their learned positions [P, E], and cosine beside sine [P, 2, 1, D], all float32."""


class OneImage:
    """Attention of a single image, whose patches all attend to each other: a VisionAttentionBackend."""

    name = "one image"
    metadata: tuple[str, ...] = ()
    captures_packed = False

    def packed(self, heads_NQD: Heads, layout: PackedLayout, scale: float | None = None) -> torch.Tensor:
        """Implements VisionAttentionBackend."""
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in heads_NQD)
        output = nn.functional.scaled_dot_product_attention(q, k, v)
        return output.squeeze(0).transpose(0, 1).flatten(1)


class Traced(nn.Module):
    """A Qwen3-VL's *tower* without complex numbers, and without the lookup of learned positions.

    OpenVINO cannot compile that lookup for images of any size. The attention must not have been finished: the channels
    i and i + D / 2 are rotated together.
    """

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        use_operations(tower, replace(PLAIN, rotary_pairs=rotated_halves))
        tower.learned = attrgetter("taps")

    def forward(self, patches_PC: torch.Tensor, places_PE: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """Return the features [U, W] of one image."""
        block = BlockMetadata(PackedLayout(places_PE, 0, ()), cos_sin, OneImage())
        return complete(self.tower(patches_PC, LearnedMetadata(block, places_PE, places_PE)))


def rotated_halves(x_NHD: torch.Tensor, cos_sin_N21D: torch.Tensor) -> torch.Tensor:
    """Rotate the channel pairs (i, i + D / 2) of each head."""
    first, second = x_NHD.chunk(2, -1)
    cos, sin = cos_sin_N21D[:, 0], cos_sin_N21D[:, 1]
    return x_NHD * cos + torch.cat((-second, first), -1) * sin


class OpenVinoTower(nn.Module):
    """Computes what *own*, a Qwen3-VL's tower, computes, by a model that OpenVINO has *compiled*."""

    def __init__(self, own: Any, compiled: openvino.CompiledModel) -> None:
        super().__init__()
        self.compiled, self.call = compiled, compiled.create_infer_request()
        self.prepare_own: Callable[..., LearnedMetadata] = own.prepare
        self.learned: Callable[[LearnedMetadata], torch.Tensor] = own.learned

    def prepare(self, grids: list[Grid], backend: VisionAttentionBackend) -> LearnedMetadata:
        """Implements MergingTower. Raises ValueError for more than one image."""
        if len(grids) > 1:
            raise ValueError("This trial encodes one image at a time.")
        return self.prepare_own(grids, backend)

    def forward(self, patches_PC: torch.Tensor, metadata: LearnedMetadata) -> Layerwise:
        """Map normalised patches to [U, W]."""
        tensors = inputs_of(patches_PC, self.learned(metadata), metadata)
        self.call.infer([openvino.Tensor(tensor.numpy(), shared_memory=True) for tensor in tensors])
        yield
        return torch.from_numpy(self.call.get_output_tensor(0).data).to(patches_PC.dtype)


def inputs_of(patches_PC: torch.Tensor, places_PE: torch.Tensor, metadata: LearnedMetadata) -> Inputs:
    """Return the inputs of `Traced`."""
    turns_PC = metadata.block.cos_sin.squeeze(1)
    parts = torch.stack((turns_PC.real, turns_PC.imag), 1)
    cos_sin = torch.cat((parts, parts), -1).unsqueeze(2)
    return patches_PC.float(), places_PE, cos_sin


def grid_of(size: tuple[int, int]) -> Grid:
    """Return the grid of an image of *size*, (width, height)."""
    return 1, size[1] // PATCH, size[0] // PATCH


def noise(grid: Grid, seed: int = 0) -> torch.Tensor:
    """Return the pixels of an image, uint8."""
    values = np.random.default_rng(seed).integers(0, 256, grid[1] * grid[2] * PIXEL_VALUES, dtype=np.uint8)
    return torch.from_numpy(values)


def read_network(folder: Path, dtype: torch.dtype) -> Any:
    """Return a Qwen3-VL whose tower alone has weights, in *dtype*; nothing is finished or packed."""
    _, network = empty_network(read_model_files(folder))
    network.language_model.to(dtype)
    network.visual.to(dtype).to_empty(device="cpu")
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name, parameter in network.visual.named_parameters():
            parameter.data.copy_(file.get_tensor(f"model.visual.{name}"))
    network.scaled_mean_std = torch.tensor(network.mean_std) * 255
    return network


def own_network(folder: Path, dtype: torch.dtype, *, rounds: bool = False) -> Any:
    """Return a Qwen3-VL whose tower is ready, in *dtype* or, if it *rounds*, in int8."""
    network = read_network(folder, dtype)
    if rounds:
        for layer in network.visual.modules():
            if isinstance(layer, Linear) and layer.is_worth_rounding:
                layer.round_weight(rounded_rows)
    finish(network.visual)
    use_operations(network.visual, resolve("cpu", dtype))
    return network


def example(network: Any, grid: Grid, seed: int = 0) -> Inputs:
    """Return the inputs of `Traced` for an image of noise."""
    patches_PC = network.normalised(noise(grid, seed).view(-1, PIXEL_VALUES), torch.float32)
    metadata = network.visual.prepare([grid], OneImage())
    return inputs_of(patches_PC, type(network.visual).learned(network.visual, metadata), metadata)


def convert(folder: Path, out: Path) -> None:
    """Write OpenVINO's forms of the tower of *folder* to *out*."""
    import nncf  # type: ignore[import-not-found]  # slow, and only this needs it

    network = read_network(folder, torch.float32)
    network.visual.patch_embed["proj"].finish()
    network.visual.finish()
    traced = Traced(network.visual).eval()
    began = time.perf_counter()
    tensors = example(network, TRACED_GRID)
    shapes = [openvino.PartialShape([-1, *tensor.shape[1:]]) for tensor in tensors]
    with torch.inference_mode():
        model = openvino.convert_model(traced, example_input=tensors, input=shapes)
    openvino.save_model(model, out / "plain.xml", compress_to_fp16=False)
    print(f"converted in {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    rounded = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    openvino.save_model(rounded, out / "weights.xml", compress_to_fp16=False)
    print(f"rounded weights in {time.perf_counter() - began:.1f} s", flush=True)
    began = time.perf_counter()
    grids = [(1, 2 * (8 + number), 2 * (14 - number)) for number in range(CALIBRATION_IMAGES)]
    images = [[tensor.numpy() for tensor in example(network, grid, seed)] for seed, grid in enumerate(grids)]
    rounded = nncf.quantize(
        model, nncf.Dataset(images), model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION_IMAGES
    )
    openvino.save_model(rounded, out / "int8.xml", compress_to_fp16=False)
    print(f"rounded with activations in {time.perf_counter() - began:.1f} s", flush=True)


def compile_tower(file: Path, settings: Mapping[str, Any]) -> openvino.CompiledModel:
    """Return the model of *file*, compiled for this CPU. Print the seconds."""
    began = time.perf_counter()
    common = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(file, "CPU", {**common, **settings})
    print(f"{file.name} {dict(settings)}: compiled in {time.perf_counter() - began:.1f} s", flush=True)
    return compiled


def encoded(network: Any, tower: Any, backend: VisionAttentionBackend, grid: Grid) -> torch.Tensor:
    """Return the features [U, W] of an image of noise by *tower*, as the engine computes them."""
    network.visual = tower
    pixels = noise(grid)
    return complete(network.encode(pixels, network.visual.prepare([grid], backend)))


def compare_towers(folder: Path, files: Path, names: list[str], sizes: list[tuple[int, int]], rounds: int) -> None:
    """Encode images of *sizes* in turn by our towers, and by those of OpenVINO in *names*; print seconds and errors."""
    backend = load_vision_backend(AUTO, Workload(dtype=torch.bfloat16))
    exact = own_network(folder, torch.float32)
    expected = {size: encoded(exact, exact.visual, backend, grid_of(size)) for size in sizes}
    del exact
    plain, rounded = own_network(folder, torch.bfloat16), own_network(folder, torch.bfloat16, rounds=True)
    towers = {"bfloat16": (plain, plain.visual), "int8": (rounded, rounded.visual)}
    for name in names:
        file, settings = COMPILED[name]
        compiled = compile_tower(files / f"{file}.xml", settings)
        towers[name] = plain, OpenVinoTower(towers["bfloat16"][1], compiled)
    for size in sizes:
        seconds: dict[str, list[float]] = {name: [] for name in towers}
        cpu: dict[str, list[float]] = {name: [] for name in towers}
        errors: dict[str, tuple[float, float]] = {}
        for turn in range(1 + rounds):
            for name, (network, tower) in towers.items():
                began, used = time.perf_counter(), time.process_time()
                found = encoded(network, tower, backend, grid_of(size))
                if turn:
                    seconds[name].append(time.perf_counter() - began)
                    cpu[name].append(time.process_time() - used)
                error = (found.float() - expected[size]).abs()
                errors[name] = error.mean().item(), error.max().item()
        scale = expected[size].abs().mean().item()
        for name in towers:
            ratios = [other / own for other, own in zip(seconds[name], seconds["int8"], strict=True)]
            mean, most = (error / scale for error in errors[name])
            print(
                f"{size[0]}x{size[1]}, {name}: {statistics.median(seconds[name]):.3f} s, "
                f"{statistics.median(ratios):.2f} of int8's; of processors {statistics.median(cpu[name]):.3f} s; "
                f"error {mean:.4f} on average and {most:.3f} at most, as multiples of the mean size of a feature",
                flush=True,
            )


def compare_requests(folder: Path, files: Path, names: list[str], rounds: int) -> None:
    """Answer requests in turn with our own tower in int8 and with those of OpenVINO in *names*; print seconds."""
    config = EngineConfig(
        str(folder), "benchmark", device="cpu", dtype="bfloat16", quantization="int8", max_num_seqs=4,
        threads=torch.get_num_threads(), enable_prefix_caching=False, kv_cache_bytes=1 << 29, max_inter_token_latency=0,
    )  # fmt: skip
    engine = startup.start(config, lambda *_: None)
    if not isinstance(engine.executor, LocalExecutor):
        raise TypeError("The tower of several processes cannot be replaced.")
    network: Any = engine.executor.runner.network
    towers = {"int8": network.visual}
    for name in names:
        file, settings = COMPILED[name]
        towers[name] = OpenVinoTower(network.visual, compile_tower(files / f"{file}.xml", settings))
    numbers = iter(range(1, 1000))
    for size, num_tokens in ROWS:
        seconds: dict[str, list[float]] = {name: [] for name in towers}
        for turn in range(1 + rounds):
            for name, tower in towers.items():
                network.visual = tower
                taken, _ = measured(engine, next(numbers), size, num_tokens)
                if turn:
                    seconds[name].append(taken)
        for name in towers:
            ratios = [other / own for other, own in zip(seconds[name], seconds["int8"], strict=True)]
            print(
                f"{size[0]}x{size[1]}, {num_tokens} tokens, {name}: {statistics.median(seconds[name]):.2f} s, "
                f"{statistics.median(ratios):.2f} of int8's",
                flush=True,
            )
    engine.close()


def main() -> None:
    """Convert, or compare, as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("what", choices=("convert", "tower", "requests"))
    parser.add_argument("files", type=Path)
    parser.add_argument("--names", nargs="*", choices=COMPILED, default=list(COMPILED))
    parser.add_argument("--sizes", nargs="+", type=int, default=[number for size in SIZES for number in size])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    torch.set_grad_enabled(False)
    sizes = list(zip(arguments.sizes[::2], arguments.sizes[1::2], strict=True))
    run: Mapping[str, Callable[[], None]] = {
        "convert": partial(convert, arguments.model, arguments.files),
        "tower": partial(compare_towers, arguments.model, arguments.files, arguments.names, sizes, arguments.rounds),
        "requests": partial(compare_requests, arguments.model, arguments.files, arguments.names, arguments.rounds),
    }
    run[arguments.what]()


if __name__ == "__main__":
    main()
