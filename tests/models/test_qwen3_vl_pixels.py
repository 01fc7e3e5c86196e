"""Layout and patches of Qwen3-VL, against the reference processor. A3, A10, F4"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from saccade.errors import ImageTooLarge, InternalError, StartupError
from saccade.media.decode import decode
from saccade.media.header import PictureLimits, read_header
from saccade.models.preprocessing import merge_blocks
from saccade.models.qwen3_vl import FAMILY
from saccade.models.qwen3_vl.layout import Layout
from saccade.models.qwen3_vl.pixels import Pixels

CORPUS = pictures.corpus()
PREPROCESSOR = {
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
CONFIG = {"image_token_id": 0, "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}


@pytest.fixture(scope="module")
def processor(tiny_qwen3_vl: Path) -> Any:
    import transformers

    return transformers.AutoImageProcessor.from_pretrained(tiny_qwen3_vl)


@pytest.fixture(scope="module")
def layout(tiny_qwen3_vl: Path) -> Layout:
    names = ("config.json", "preprocessor_config.json")
    return Layout(*(json.loads((tiny_qwen3_vl / name).read_text()) for name in names))


def _patches(encoded: bytes, layout: Layout) -> np.ndarray:
    picture = layout.picture(*read_header(encoded).upright, layout.settings)
    out = np.full(picture.pixel_shape, 7, picture.pixel_dtype)
    Pixels(layout.settings).write(decode(encoded, PictureLimits()), picture, out)
    return out


def _normalised(patches: np.ndarray, settings: Any) -> torch.Tensor:
    """The engine's half: the frame doubled, then (x - mean * 255) / (std * 255)."""
    frames = torch.from_numpy(patches).reshape(len(patches), 3, 1, 16, 16).expand(-1, -1, 2, -1, -1)
    mean, std = (torch.tensor(settings[key]).mul(255).reshape(3, 1, 1, 1) for key in ("image_mean", "image_std"))
    return frames.float().sub(mean).div(std).reshape(len(patches), -1)


@pytest.mark.parametrize("name", CORPUS)
def test_patches_equal_the_reference(name: str, layout: Layout, processor: Any) -> None:
    with Image.open(io.BytesIO(CORPUS[name])) as image:
        expected = processor(images=[ImageOps.exif_transpose(image)], return_tensors="pt")
    counted = layout.picture(*read_header(CORPUS[name]).upright, layout.settings)
    assert list(counted.grid) == expected["image_grid_thw"][0].tolist()
    assert counted.num_tokens == int(expected["image_grid_thw"].prod()) // 4
    assert torch.equal(_normalised(_patches(CORPUS[name], layout), layout.settings), expected["pixel_values"])


def test_there_are_pictures_enough() -> None:
    assert len(CORPUS) >= 40


def test_16_bit_grey_is_seen_as_its_upper_byte(layout: Layout, processor: Any) -> None:
    image = pictures.picture(75, 51, "I;16")
    expected = processor(images=[Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))], return_tensors="pt")
    assert torch.equal(_normalised(_patches(pictures.encode(image), layout), layout.settings), expected["pixel_values"])


@given(width=st.integers(1, 16_384), height=st.integers(1, 16_384))
@example(width=48, height=80)  # 1.5 and 2.5 merged blocks: half to even
@example(width=16, height=3200)
@example(width=7000, height=35)
@hypothesis_settings(max_examples=300, deadline=None)
def test_sizes_equal_the_reference(width: int, height: int) -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    settings = merge_blocks.resolve(PREPROCESSOR)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ImageTooLarge):
            merge_blocks.resized(width, height, settings)
    else:
        expected = smart_resize(height, width, 32, settings["min_pixels"], settings["max_pixels"])
        assert merge_blocks.resized(width, height, settings) == expected


def test_settings_are_the_reference_processors(tmp_path: Path) -> None:
    import transformers

    for given_settings in (
        {},
        {"min_pixels": 5000},
        {"max_pixels": 90_000, "size": PREPROCESSOR["size"]},
        PREPROCESSOR,
    ):
        content = {"image_processor_type": "Qwen2VLImageProcessorFast", **given_settings}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
        reference = transformers.AutoImageProcessor.from_pretrained(tmp_path)
        settings = merge_blocks.resolve(given_settings)
        size = (settings.pop("min_pixels"), settings.pop("max_pixels"))
        assert size == (reference.size["shortest_edge"], reference.size["longest_edge"])
        for key, value in settings.items():
            theirs = getattr(reference, key)
            assert value == (list(theirs) if key.startswith("image_") else theirs)


def test_settings_are_json(layout: Layout) -> None:
    assert json.loads(json.dumps(layout.settings)) == layout.settings


@pytest.mark.parametrize(
    ("config", "preprocessor", "named"),
    [  # A9
        ({"vision_config": {"patch_size": 14}}, {}, "patch_size"),
        ({"vision_config": {"spatial_merge_size": 1}}, {}, "spatial_merge_size"),
        ({}, {"size": {"shortest_edge": 65_536}}, "max_pixels"),
        ({}, {"size": 448}, "size"),
        ({}, {"patch_size": 0}, "patch_size"),
        ({}, {"image_std": 0.5}, "image_std"),
        ({}, {"image_mean": ["0.5"] * 3}, "image_mean"),
        ({}, {"resample": 2}, "resample"),
        ({}, {"do_resize": False}, "do_resize"),
    ],
)
def test_wrong_files_stop_the_start(config: dict[str, Any], preprocessor: dict[str, Any], named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout({**CONFIG, **config}, {**PREPROCESSOR, **preprocessor})


@pytest.mark.parametrize(
    ("config", "token_id"), [({"image_token_id": 0}, 0), ({"image_token_id": None}, None), ({}, None)]
)
def test_placeholder_is_what_config_says(config: dict[str, Any], token_id: int | None) -> None:  # A9
    assert FAMILY.placeholder_token_id(config) == token_id


@pytest.mark.parametrize("given_id", ["7", -1, True])
def test_placeholder_that_is_no_id_stops_the_start(given_id: object) -> None:  # A9
    with pytest.raises(StartupError, match="image_token_id"):
        FAMILY.placeholder_token_id({"image_token_id": given_id})


def test_a_layout_of_another_size_is_refused(layout: Layout) -> None:
    other = layout.picture(100, 200, layout.settings)
    with pytest.raises(InternalError):
        Pixels(layout.settings).write(pictures.draw(200, 100), other, np.empty(other.pixel_shape, np.uint8))
