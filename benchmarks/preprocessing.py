"""A JPEG of 12 megapixels to patches, beside the class that the release names: `python -m benchmarks.preprocessing`.

Saccade and the class have one thread each, in turn. The class is transformers' with torchvision; it normalises to
float32, which the engine does for Saccade's uint8. tests/conformance/test_pixels.py compares the values of both.
"""

import io
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmarks.bfloat16_error import quiet
from benchmarks.measured import commit, machine
from saccade import models
from saccade.media.decode import decode
from saccade.media.header import ImageLimits
from saccade.models.preprocessing.processor_config import CLIP_COLOURS, HALF_COLOURS

WIDTH, HEIGHT = 4000, 3000
NUM_ROUNDS = 7
SQUARES = {"temporal_patch_size": 2, "merge_size": 2, "rescale_factor": 1 / 255, "resample": 3}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


class Release(NamedTuple):
    """A class of image processors in transformers, its settings in the release, and config.json if they need it."""

    processor: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any] = MappingProxyType({})


GLM = {
    **SQUARES,
    **CLIP_COLOURS,
    "patch_size": 14,
    "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
}
RELEASES = {
    "qwen3_vl": Release(
        "Qwen2VLImageProcessor",
        {**SQUARES, **HALF_COLOURS, "patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}},
    ),
    "paddleocr_vl": Release(
        "PaddleOCRVLImageProcessor",
        {
            **SQUARES,
            **HALF_COLOURS,
            "patch_size": 14,
            "temporal_patch_size": 1,
            "min_pixels": 112896,
            "max_pixels": 1003520,
        },
    ),
    "glm4v": Release("Glm4vImageProcessor", GLM),
    "glm_ocr": Release("Glm46VImageProcessor", GLM),
    "internvl": Release(
        "GotOcr2ImageProcessor",
        {
            **IMAGENET,
            "size": {"height": 448, "width": 448},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
        },
        {"vision_config": {}},
    ),
    "smolvlm": Release(
        "SmolVLMImageProcessor",
        {
            **HALF_COLOURS,
            "size": {"longest_edge": 2048},
            "max_image_size": {"longest_edge": 512},
            "resample": 1,
            "do_image_splitting": True,
        },
        {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
    ),
    "gemma4": Release("Gemma4ImageProcessor", {}),
    "gemma4_unified": Release("Gemma4UnifiedImageProcessor", {}),
}


def photograph() -> bytes:
    """Return a JPEG of 12 megapixels with structure at every scale, from a seed."""
    draw = np.random.default_rng(0)
    coarse = Image.fromarray(draw.integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), np.uint8)).resize((WIDTH, HEIGHT))
    file = io.BytesIO()
    coarse.save(file, "JPEG", quality=90)
    return file.getvalue()


def in_turn(*programs: Callable[[], Any]) -> list[float]:
    """Return the median of each program's times, in ms, after one call of each."""
    times: list[list[float]] = [[] for _ in programs]
    for number in range(NUM_ROUNDS + 1):
        for program, own in zip(programs, times, strict=True):
            began = time.perf_counter()
            program()
            if number:
                own.append(1000 * (time.perf_counter() - began))
    return [statistics.median(own) for own in times]


def row(family: str, release: Release, encoded: bytes) -> str:
    """Return a row of the table."""
    import transformers

    layout_of = models.load_layout(family)(release.config, release.settings)
    layout = layout_of.image(WIDTH, HEIGHT, layout_of.settings)
    pixels, out = models.load_pixels(family)(layout_of.settings), np.empty(layout.pixel_shape, np.uint8)
    processor = getattr(transformers, release.processor)(**release.settings)
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    rgb = np.asarray(image)

    def theirs(given: Image.Image) -> object:
        return processor(images=[given], return_tensors="pt")

    decoded = in_turn(lambda: pixels.write_pixels(rgb, layout, out), lambda: theirs(image))
    from_file = in_turn(
        lambda: pixels.write_pixels(decode(encoded, ImageLimits()), layout, out),
        lambda: theirs(Image.open(io.BytesIO(encoded)).convert("RGB")),
    )
    cells = [f"{one:.0f} | {other:.0f} | {one / other:.2f}x" for one, other in (decoded, from_file)]
    return f"| {family} | `{release.processor}` | {layout.num_tokens} | {' | '.join(cells)} |"


def main() -> None:
    """Print a table with a row for each family."""
    torch.set_num_threads(1)
    quiet()
    encoded = photograph()
    print(f"Machine: {machine()}; 1 thread  \nCommit: {commit()}\n")
    print("| family | class | tokens | decoded: ours, ms | theirs | ratio | file: ours, ms | theirs | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for family, release in RELEASES.items():
        print(row(family, release, encoded), flush=True)


if __name__ == "__main__":
    main()
