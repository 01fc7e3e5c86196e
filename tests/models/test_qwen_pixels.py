"""Layout and patches of the families that merge 2 x 2 patches, against their reference processor. A3, A10, F4"""

import io
import json
from pathlib import Path
from typing import Any

import images
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from tables import table

from saccade import models
from saccade.errors import InternalError, StartupError
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header
from saccade.models.family import Layout
from saccade.protocol.media import NUMPY_DTYPE, ImageLayout

CORPUS = images.corpus()
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# As in the releases' own files.
OLDER = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
} | CLIP
NEWER = {
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
FAMILIES = {"qwen2_vl": OLDER, "qwen2_5_vl": OLDER, "qwen3_vl": NEWER, "qwen3_5": NEWER}
TOWER_KEYS = ("patch_size", "spatial_merge_size", "temporal_patch_size")


def _config(name: str, **vision: object) -> dict[str, Any]:
    patch = FAMILIES[name]["patch_size"]
    return {"vision_config": {**dict(zip(TOWER_KEYS, (patch, 2, 2), strict=True)), **vision}}


def _reference(folder: Path, preprocessor: dict[str, Any]) -> Any:
    import transformers

    content = {"image_processor_type": "Qwen2VLImageProcessorFast", **preprocessor}
    (folder / "preprocessor_config.json").write_text(json.dumps(content))
    return transformers.AutoImageProcessor.from_pretrained(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def layout(family: str) -> Layout:
    return models.load_layout(family)(_config(family), FAMILIES[family])


@pytest.fixture(scope="module")
def processor(family: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _reference(tmp_path_factory.mktemp(family), FAMILIES[family])


def _written(family: str, encoded: bytes, layout: Layout, image: ImageLayout) -> np.ndarray:
    out = np.full(image.pixel_shape, 7, NUMPY_DTYPE[image.pixel_dtype])
    models.load_pixels(family)(layout.settings).write_pixels(decode(encoded, ImageLimits()), image, out)
    return out


def _normalised(patches: np.ndarray, settings: Any) -> torch.Tensor:
    """The engine's half: the frame doubled, then (x - mean * 255) / (std * 255)."""
    side = settings["patch_size"]
    frames = torch.from_numpy(patches).reshape(len(patches), 3, 1, side, side).expand(-1, -1, 2, -1, -1)
    mean, std = (torch.tensor(settings[key]).mul(255).reshape(3, 1, 1, 1) for key in ("image_mean", "image_std"))
    return frames.float().sub(mean).div(std).reshape(len(patches), -1)


@table("name", CORPUS)
def test_patches_equal_the_reference(name: str, family: str, layout: Layout, processor: Any) -> None:
    encoded = CORPUS[name]
    with Image.open(io.BytesIO(encoded)) as image:
        expected = processor(images=[ImageOps.exif_transpose(image)], return_tensors="pt")
    counted = layout.image(*read_header(encoded).upright, layout.settings)
    assert list(counted.grid) == expected["image_grid_thw"][0].tolist()
    assert counted.num_tokens == int(expected["image_grid_thw"].prod()) // 4
    patches = _written(family, encoded, layout, counted)
    assert torch.equal(_normalised(patches, layout.settings), expected["pixel_values"])
    # The form of wires that are not ours.
    single, half = (
        _written(family, encoded, layout, layout.external(counted, dtype)) for dtype in ("float32", "bfloat16")
    )
    assert torch.equal(torch.from_numpy(single), expected["pixel_values"])
    assert torch.equal(torch.from_numpy(half).view(torch.bfloat16), expected["pixel_values"].to(torch.bfloat16))


def test_there_are_images_enough() -> None:
    assert len(CORPUS) >= 60


def test_16_bit_grey_is_seen_as_its_upper_byte(family: str, layout: Layout, processor: Any) -> None:
    image = images.random_image(75, 51, "I;16")
    expected = processor(images=[Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))], return_tensors="pt")
    patches = _written(family, images.encode(image), layout, layout.image(75, 51, layout.settings))
    assert torch.equal(_normalised(patches, layout.settings), expected["pixel_values"])


@pytest.mark.parametrize("older", ["qwen2_vl", "qwen2_5_vl"])
def test_missing_settings_of_older_families_equal_the_reference(older: str, tmp_path: Path) -> None:
    silent = {"do_resize": True}
    reference, settings = _reference(tmp_path, silent), models.load_layout(older)({}, silent).settings
    edges = (reference.size["shortest_edge"], reference.size["longest_edge"])
    assert (settings["min_pixels"], settings["max_pixels"]) == edges
    for key in ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"):
        theirs = getattr(reference, key)
        assert settings[key] == (list(theirs) if key.startswith("image_") else theirs)


def test_settings_are_json(layout: Layout) -> None:
    assert json.loads(json.dumps(layout.settings)) == layout.settings


@table("key", TOWER_KEYS)
def test_a_tower_of_another_cut_stops_the_start(key: str, family: str) -> None:  # A9
    with pytest.raises(StartupError, match=key):
        models.load_layout(family)(_config(family, **{key: 7}), FAMILIES[family])


@table(
    ("architecture", "model_type", "owner"),
    [  # A1
        ("Qwen2VLForConditionalGeneration", "qwen2_vl", "qwen2_vl"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "qwen2_5_vl"),
        ("Qwen3VLForConditionalGeneration", "qwen3_vl", "qwen3_vl"),
        ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", "qwen3_vl"),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5"),
        ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5"),
    ],
)
def test_architectures_and_model_types(architecture: str, model_type: str, owner: str) -> None:
    assert models.family_of({"architectures": [architecture]}) == owner
    assert models.family_of({"model_type": model_type}) == owner


@table(
    ("config", "token_id"),
    [
        ({"image_token_id": 0}, 0),
        ({"image_token_id": 151_655, "vision_token_id": 151_654}, 151_655),
        ({"image_token_id": None}, None),
        ({"vision_token_id": 151_654}, None),
    ],
)
def test_placeholder_comes_from_the_config(family: str, config: dict[str, Any], token_id: int | None) -> None:  # A9, E2
    assert models.families()[family].placeholder_token_id(config) == token_id


@table("given_id", ["7", -1, True])
def test_placeholder_that_is_no_id_stops_the_start(family: str, given_id: object) -> None:  # A9
    with pytest.raises(StartupError, match="image_token_id"):
        models.families()[family].placeholder_token_id({"image_token_id": given_id})


def test_a_layout_of_another_size_is_refused(family: str, layout: Layout) -> None:
    other = layout.image(100, 200, layout.settings)
    with pytest.raises(InternalError):
        models.load_pixels(family)(layout.settings).write_pixels(
            images.draw(200, 100), other, np.empty(other.pixel_shape, np.uint8)
        )
