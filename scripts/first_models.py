"""Write the tables of first models in docs/: `python scripts/first_models.py`; with `--check`, only compare.

The table in docs/start.md is calculated, and no weights were loaded. Parameters are those of Saccade's network, built without storage
from the sizes that each release has in its config.json and preprocessor_config.json. Tokens and patches are those of
Saccade's layout of the image. The time is arithmetic: a matrix of P values costs 2 P operations for each token or patch,
and attention of n positions 4 n n operations for each channel and layer, of which a decoder's causal mask needs half.
The sum, divided by OPERATIONS_PER_SECOND, is the time to encode the image and to compute its tokens.

The table in docs/read.md has what benchmarks/document_page.py measured.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from saccade.cli.costs import EXAMPLE, ImageCost, image_cost
from saccade.config import GIB
from saccade.engine.executor.loader import count_parameters, empty_network
from saccade.protocol.description import ModelFiles

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "results" / "document-page.json"
BEGIN, END = "<!-- scripts/first_models.py writes this table. -->\n\n", "\n<!-- Here it ends. -->\n"
SIZES = (EXAMPLE, (640, 480))
OPERATIONS_PER_SECOND = 100e9
"""Two cores in float32 at about half of what their vector units could do: 2 x 32 operations a cycle at 3 GHz are 192e9."""


@dataclass(frozen=True)
class FirstModel:
    """A release by its hub id: what its files say of its shapes, and how its vision encoder attends.

    *vision* is the prefix of the encoder's parameters. *windows* are (layers, positions that see each other): None is
    all patches of the image. *num_unused* parameters are in the release and not in Saccade's network, such as the pooling
    head of PaddleOCR-VL's encoder.
    """

    name: str
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    windows: tuple[tuple[int, int | None], ...]
    vision: str = "visual."
    num_unused: int = 0


QWEN_TEXT = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "num_hidden_layers": 28, "max_position_embeddings": 128000,
}  # fmt: skip
MODELS = (
    FirstModel(
        "HuggingFaceTB/SmolVLM-256M-Instruct",
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "image_token_id": 49190,
            "scale_factor": 4,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280,
                "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000, "hidden_act": "silu",
            },
            "vision_config": {
                "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
                "image_size": 512, "patch_size": 16,
            },
        },
        {
            "do_image_splitting": True, "do_resize": True, "do_rescale": True, "do_normalize": True, "do_pad": True,
            "do_convert_rgb": True, "resample": 1, "rescale_factor": 1 / 255, "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3, "size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512},
        },
        ((12, 1024),),
        "vision",
    ),
    FirstModel(
        "PaddlePaddle/PaddleOCR-VL-1.6",
        {
            "architectures": ["PaddleOCRVLForConditionalGeneration"],
            "image_token_id": 100295, "tie_word_embeddings": False, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
            "vocab_size": 103424, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "vision_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
                "image_size": 384, "patch_size": 14, "spatial_merge_size": 2,
            },
        },
        {},
        ((27, None),),
        num_unused=52_987_088,
    ),
    FirstModel(
        "Qwen/Qwen3-VL-2B-Instruct",
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "image_token_id": 151655,
            "video_token_id": 151656,
            "tie_word_embeddings": True,
            "text_config": {
                **QWEN_TEXT, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
                "rope_theta": 5000000, "tie_word_embeddings": True, "attention_bias": False,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            },
            "vision_config": {
                "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
                "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
                "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
                "hidden_act": "gelu_pytorch_tanh",
            },
        },
        {
            "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        },
        ((24, None),),
    ),
    FirstModel(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        {
            **QWEN_TEXT,
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "image_token_id": 151655, "video_token_id": 151656, "hidden_size": 3584, "intermediate_size": 18944,
            "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "use_sliding_window": False,
            "sliding_window": 32768, "max_window_layers": 28, "tie_word_embeddings": False,
            "vision_config": {
                "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
                "patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
                "in_chans": 3, "hidden_act": "silu", "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
            },
        },
        {
            "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
        ((4, None), (28, 64)),
    ),
)  # fmt: skip


def costs_table() -> str:
    """Return the table of memory, tokens and seconds, which is calculated but for the last column."""
    head = (
        *("model", "disk", "memory in bfloat16, float32", "tokens"),
        *(f"{width}x{height}" for width, height in SIZES),
        "a page, measured",
    )
    return _table(head, map(_row, MODELS))


def pages_table() -> str:
    """Return the table of what reading a page took."""
    head = ("model", "weights", "first token", "each further token", "the page", "memory")
    return _table(
        head,
        (
            (
                f"`{row['model']}`",
                row["format"],
                f"{row['first_token_seconds']:.0f} s",
                f"{row['token_milliseconds']:.0f} ms",
                f"{row['page_seconds']:.0f} s",
                f"{row['memory_mib'] / 1024:.1f} GiB",
            )
            for row in measured_pages()
        ),
    )


def measured_pages() -> list[dict[str, Any]]:
    """Return the rows that benchmarks/document_page.py wrote."""
    rows: list[dict[str, Any]] = json.loads(MEASURED.read_text())["rows"]
    return rows


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


TABLES: Mapping[Path, Callable[[], str]] = {
    ROOT / "docs" / "start.md": costs_table,
    ROOT / "docs" / "read.md": pages_table,
}
"""By the page that has it."""


def empty(model: FirstModel) -> tuple[ModelFiles, nn.Module]:
    """Return the files of *model* and its network without storage."""
    contents = {"config.json": model.config, "preprocessor_config.json": model.preprocessor}
    files = ModelFiles(files={name: json.dumps(content).encode() for name, content in contents.items()})
    return files, empty_network(files)[1]


def _row(model: FirstModel) -> list[str]:
    files, network = empty(model)
    size = count_parameters(network) * 2
    costs = [image_cost(files, "bfloat16", size=size) for size in SIZES]
    seconds = [_operations(model, network, cost) / OPERATIONS_PER_SECOND for cost in costs]
    memory = f"{_gib(size)}, {_gib(2 * size)}"
    pages = [
        f"{row['format']}: {row['page_seconds']:.0f} s, {row['memory_mib'] / 1024:.1f} GiB"
        for row in measured_pages()
        if row["model"] == model.name
    ]
    return [
        f"`{model.name}`",
        _gib(size + 2 * model.num_unused),
        memory,
        str(costs[0].num_tokens),
        *(f"{float(f'{second:.2g}'):g} s" for second in seconds),
        "; ".join(pages) or "-",
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _operations(model: FirstModel, network: nn.Module, cost: ImageCost) -> float:
    """Return the operations to encode the image and to compute its tokens; embeddings and the head are left out."""
    per_patch = per_token = 0
    for name, parameter in network.named_parameters():
        if name.startswith(model.vision) and (".blocks." in name or ".layers." in name):
            per_patch += parameter.numel()
        elif "embed" not in name and "lm_head" not in name:
            per_token += parameter.numel()
    text = model.config.get("text_config", model.config)
    channels = text["num_attention_heads"] * text.get("head_dim", text["hidden_size"] // text["num_attention_heads"])
    encoder = sum(layers * min(window or cost.num_patches, cost.num_patches) for layers, window in model.windows)
    attention = 4 * cost.num_patches * encoder * model.config["vision_config"]["hidden_size"]
    attention += 2 * cost.num_tokens**2 * channels * text["num_hidden_layers"]
    return 2 * per_patch * cost.num_patches + 2 * per_token * cost.num_tokens + attention


def main() -> None:
    """Write the tables, or fail if a page has another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    for page, table in TABLES.items():
        before, rest = page.read_text().split(BEGIN)
        old, after = rest.split(END)
        if not is_check:
            page.write_text(before + BEGIN + table() + END + after)
        elif old != table():
            sys.exit(f"The table of {page} is out of date: run `python scripts/first_models.py`.")


if __name__ == "__main__":
    main()
