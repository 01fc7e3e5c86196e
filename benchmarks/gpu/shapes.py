"""Models with random weights, made on the device: the shapes of Qwen3-VL's 2B and 8B releases, plain or quantised."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine.shape_2b import BUNDLED
from saccade.engine.executor.loader import LoadedModel
from saccade.engine.executor.weight_files import STORED_DTYPES
from saccade.nn.formats.fp8 import Fp8
from saccade.nn.formats.nvfp4 import Nvfp4
from saccade.nn.formats.packed_ints import compressed
from saccade.nn.formats.quantised import QuantisedWeight, Region, WeightFormat
from saccade.nn.layers import Linear


class Shape(NamedTuple):
    """The values of a config.json that differ from the bundled model's, and the largest image in pixels."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    is_tied: bool
    most_pixels: int


def _shape(layers: int, hidden: int, mlp: int, heads: int, tower: tuple[int, int, int], deep: list[int]) -> Shape:
    """Return the shape of a release: the tower's layers, hidden size and MLP are *tower*."""
    text = {
        "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rope_theta": 5e6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    }  # fmt: skip
    vision = {
        "depth": tower[0], "hidden_size": tower[1], "intermediate_size": tower[2], "num_heads": 16,
        "out_hidden_size": hidden, "num_position_embeddings": 2304, "deepstack_visual_indexes": deep,
    }  # fmt: skip
    return Shape(text, vision, is_tied=hidden < 4096, most_pixels=4096 * 4096)


SHAPE_2B = _shape(28, 2048, 6144, 16, (24, 1024, 4096), [5, 11, 17])
SHAPE_8B = _shape(36, 4096, 12288, 32, (27, 1152, 4304), [8, 16, 24])
SHAPE_TINY = Shape({"num_hidden_layers": 2}, {"depth": 2, "deepstack_visual_indexes": [1]}, True, 12288)

FORMATS: Mapping[str, WeightFormat] = {"fp8": Fp8(), "int4": compressed(4, 128), "nvfp4": Nvfp4()}


def write(folder: Path, shape: Shape) -> Path:
    """Fill *folder* with the files of a model without weights, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in BUNDLED.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((BUNDLED / "config.json").read_text())
    config["text_config"] |= shape.text
    config["vision_config"] |= shape.vision
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = shape.is_tied
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    processor = json.loads((BUNDLED / "preprocessor_config.json").read_text())
    processor["size"] |= {"longest_edge": shape.most_pixels}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    return folder


def quantised_parts(model: LoadedModel, format: WeightFormat) -> dict[Linear, tuple[QuantisedWeight, ...]]:
    """Return random weights in *format* for the linear layers of the decoder, without lm_head, as releases have them.

    Layers that are joined have a part each.
    """
    return {
        layer: tuple(_random_weight(layer, num_rows, format) for num_rows in layer.partitions)
        for name, layer in model.module.named_modules()
        if isinstance(layer, Linear) and name.startswith("language_model.layers.")
    }


def _random_weight(layer: Linear, num_rows: int, format: WeightFormat) -> QuantisedWeight:
    """Return random codes, with scales that give the values a mean square of about 1 / columns."""
    device, num_columns = layer.weight.device, layer.weight.shape[1]
    region = Region(0, num_rows, 0, num_columns)
    fields = {}
    for name, field in format.fields.items():
        dtype, shape = STORED_DTYPES[field.dtypes[0]], field.shape(region)
        if dtype.is_floating_point and not (dtype.itemsize == 1 and field.cell == (1, 1)):
            # The scales of NVFP4 are multiplied, and one of them is a number of 8 bits.
            scale = 1.0 if dtype.itemsize == 1 else SPREAD[format.name] / num_columns**0.5
            fields[name] = torch.full(shape, scale, device=device).to(dtype)
        elif dtype.is_floating_point:
            fields[name] = torch.randn(shape, device=device).to(dtype)
        else:
            codes = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device)
            fields[name] = codes.view(dtype)
    return QuantisedWeight(format, fields, region)


SPREAD: Mapping[str, float] = {FORMATS["fp8"].name: 1.0, FORMATS["int4"].name: 1 / 4.6, FORMATS["nvfp4"].name: 1 / 2.9}
"""One over the root mean square of random codes."""
