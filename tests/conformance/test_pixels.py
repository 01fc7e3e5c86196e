"""Every family's patches against its reference processor, through the pool, on many sizes. A3, A10"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import pytest
import torch
from PIL import Image, ImageOps

from saccade import models
from saccade.gateway.media_pool import MediaPool, MediaPoolConfig
from saccade.media.header import read_header
from saccade.transport.shared_memory import read_slot

pytestmark = pytest.mark.conformance


def _many() -> dict[str, bytes]:
    """Return the corpus and 400 pictures of random size, aspect and kind."""
    generator = np.random.default_rng(0)
    drawn = pictures.corpus()
    for seed in range(400):
        area, aspect = np.exp(generator.uniform(np.log([16, 1 / 180]), np.log([1_500_000, 180])))
        width, height = max(1, round((area * aspect) ** 0.5)), max(1, round((area / aspect) ** 0.5))
        if max(width, height) <= 200 * min(width, height):
            kind = ("JPEG", "PNG", "WEBP")[seed % 3]
            drawn[f"{kind} {width}x{height}"] = pictures.encode(pictures.picture(width, height, seed=seed), kind)
    return drawn


def _normalised(patches: torch.Tensor, settings: Any) -> torch.Tensor:
    """The engine's half: frames doubled, then (x - mean * 255) / (std * 255)."""
    patch, frames = settings["patch_size"], settings["temporal_patch_size"]
    doubled = patches.reshape(-1, 3, 1, patch, patch).expand(-1, -1, frames, -1, -1).float()
    mean, std = (torch.tensor(settings[key]).mul(255).reshape(3, 1, 1, 1) for key in ("image_mean", "image_std"))
    return doubled.sub(mean).div(std).reshape(len(patches), -1)


@pytest.mark.parametrize("family", models.families())
async def test_patches_equal_the_reference(family: str, request: pytest.FixtureRequest) -> None:
    import transformers

    folder: Path = request.getfixturevalue(f"tiny_{family}")
    names = ("config.json", "preprocessor_config.json")
    layout = models.load_layout(family)(*(json.loads((folder / name).read_text()) for name in names))
    processor: Any = transformers.AutoImageProcessor.from_pretrained(folder)
    pool = MediaPool(MediaPoolConfig(num_processes=1))
    await pool.start()
    try:
        for name, encoded in _many().items():
            counted = layout.picture(*read_header(encoded).upright, layout.settings)
            prepared = await pool.picture(encoded, family, layout.settings, counted)
            assert prepared.slot is not None
            patches = torch.frombuffer(bytearray(read_slot(prepared.slot)), dtype=torch.uint8)
            pool.release([prepared.slot.name])
            with Image.open(io.BytesIO(encoded)) as image:
                expected = processor(images=[ImageOps.exif_transpose(image)], return_tensors="pt")
            assert list(counted.grid) == expected["image_grid_thw"][0].tolist(), name
            ours = _normalised(patches.reshape(counted.pixel_shape), layout.settings)
            assert torch.equal(ours, expected["pixel_values"]), name
    finally:
        await pool.close()
