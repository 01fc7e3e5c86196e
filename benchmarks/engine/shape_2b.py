"""A Qwen3-VL of the 2B release's shape with random weights, made on the spot: what people run, without a download.

Tokenizer, template and processor are the bundled model's. Embeddings of the ids that its tokenizer lacks are zero, so
that answers are text.
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.measured import ROOT

BUNDLED = ROOT / "src/saccade/cli/bundled/model"
NUM_LAYERS, HIDDEN, MLP, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, VOCABULARY = 28, 2048, 6144, 16, 8, 128, 151936
VISION_LAYERS, VISION_HIDDEN, VISION_MLP, VISION_HEADS, SIDE_SQUARED = 24, 1024, 4096, 16, 2304
DEEPSTACK = (5, 11, 17)
NUM_DRAWN = 1 << 22
"""Random values drawn; every tensor repeats them from a place of its own on."""


def write(folder: Path, *, half: bool = False) -> Path:
    """Fill *folder* where it is empty, and return it; *half* has half of the layers. 4.3 GB in bfloat16, or 2.5."""
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for path in BUNDLED.iterdir():
        if path.name not in ("model.safetensors", "config.json", "README.md"):
            shutil.copy(path, folder)
    # The release's: the bundled model takes small images only.
    processor = json.loads((BUNDLED / "preprocessor_config.json").read_text())
    processor["size"] = {"longest_edge": 16777216, "shortest_edge": 65536}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    config, num_tokens = _config(half)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    drawn = torch.randn(NUM_DRAWN, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tensors = {name: drawn_tensor(name, shape, drawn) for name, shape in _shapes(config)}
    tensors["model.language_model.embed_tokens.weight"][num_tokens:] = 0
    save_file(tensors, weights.with_suffix(".part"), metadata={"format": "pt"})
    weights.with_suffix(".part").rename(weights)
    return folder


def _config(half: bool) -> tuple[dict[str, Any], int]:
    """Return config.json, and how many ids the tokenizer has."""
    config = json.loads((BUNDLED / "config.json").read_text())
    num_tokens = config["text_config"]["vocab_size"]
    share = 2 if half else 1
    config["text_config"] |= {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": MLP,
        "num_hidden_layers": NUM_LAYERS // share, "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 32768,
        "rope_theta": 5e6,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    }  # fmt: skip
    config["vision_config"] |= {
        "depth": VISION_LAYERS // share, "hidden_size": VISION_HIDDEN, "intermediate_size": VISION_MLP,
        "num_heads": VISION_HEADS, "out_hidden_size": HIDDEN, "num_position_embeddings": SIDE_SQUARED,
        "deepstack_visual_indexes": [layer // share for layer in DEEPSTACK],
    }  # fmt: skip
    return config, num_tokens


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the checkpoint's tensors, named as the release names them."""
    text, vision = "model.language_model", "model.visual"
    yield f"{text}.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield f"{text}.norm.weight", (HIDDEN,)
    for layer in range(config["text_config"]["num_hidden_layers"]):
        prefix = f"{text}.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (HIDDEN,)
        for name, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS), ("v", NUM_KV_HEADS)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (heads * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, NUM_HEADS * HEAD_DIM)
        yield f"{prefix}.self_attn.q_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.self_attn.k_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.mlp.gate_proj.weight", (MLP, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (MLP, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, MLP)
    settings = config["vision_config"]
    kernel = (settings["in_channels"], settings["temporal_patch_size"], settings["patch_size"], settings["patch_size"])
    yield from biased(f"{vision}.patch_embed.proj", VISION_HIDDEN, kernel)
    yield f"{vision}.pos_embed.weight", (SIDE_SQUARED, VISION_HIDDEN)
    for layer in range(settings["depth"]):
        prefix = f"{vision}.blocks.{layer}"
        yield from biased(f"{prefix}.norm1", VISION_HIDDEN)
        yield from biased(f"{prefix}.norm2", VISION_HIDDEN)
        yield from biased(f"{prefix}.attn.qkv", 3 * VISION_HIDDEN, (VISION_HIDDEN,))
        yield from biased(f"{prefix}.attn.proj", VISION_HIDDEN, (VISION_HIDDEN,))
        yield from biased(f"{prefix}.mlp.linear_fc1", VISION_MLP, (VISION_HIDDEN,))
        yield from biased(f"{prefix}.mlp.linear_fc2", VISION_HIDDEN, (VISION_MLP,))
    merged = VISION_HIDDEN * settings["spatial_merge_size"] ** 2
    deep = [f"deepstack_merger_list.{number}" for number in range(len(DEEPSTACK))]
    for name in ("merger", *deep):
        yield from biased(f"{vision}.{name}.norm", VISION_HIDDEN if name == "merger" else merged)
        yield from biased(f"{vision}.{name}.linear_fc1", merged, (merged,))
        yield from biased(f"{vision}.{name}.linear_fc2", HIDDEN, (merged,))


def biased(name: str, num_outputs: int, inputs: tuple[int, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield weight and bias of a layer, or of a norm without *inputs*."""
    yield f"{name}.weight", (num_outputs, *inputs)
    yield f"{name}.bias", (num_outputs,)


def drawn_tensor(name: str, shape: tuple[int, ...], drawn: torch.Tensor) -> torch.Tensor:
    """Return N(0, 1 / inputs) for a matrix, and near 1 or 0 for a norm or a bias."""
    number = math.prod(shape)
    start = hash_of(name) % NUM_DRAWN
    values = drawn.roll(-start).repeat(-(-number // NUM_DRAWN))[:number].view(shape)
    if len(shape) == 1:
        return values * 0.1 + (0.0 if name.endswith(".bias") else 1.0)
    return values / math.sqrt(math.prod(shape[1:]))


def hash_of(name: str) -> int:
    """Return a number that is the same in every run."""
    return sum(place * byte for place, byte in enumerate(name.encode(), start=1)) * 104729


if __name__ == "__main__":
    write(Path(sys.argv[1]))
