"""JPEG straight into memory is JPEG as Pillow decodes it, bit for bit."""

import io
from typing import Any

import images
import numpy as np
import pytest
from PIL import Image
from tables import table

from saccade.errors import InvalidImage
from saccade.media import jpeg
from saccade.media.decode import decode
from saccade.media.header import ImageLimits

KINDS: dict[str, dict[str, Any]] = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "coarse": {"quality": 5},
    "fine": {"quality": 100, "optimize": True},
    "restarts": {"restart_marker_blocks": 3},
}
SIZES = ((1, 1), (7, 5), (8, 8), (16, 17), (33, 31), (130, 97), (641, 479), (2, 600), (600, 2))


def _by_pillow(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB"))


@table("kind", KINDS)
@table("mode", ["RGB", "L"])
def test_pixels_equal_pillow(kind: str, mode: str) -> None:
    for seed, (width, height) in enumerate(SIZES):
        encoded = images.encode(images.random_image(width, height, mode, seed), "JPEG", **KINDS[kind])
        ours = jpeg.decode(encoded, height, width)
        assert ours is not None
        assert np.array_equal(ours, _by_pillow(encoded)), (width, height)


@pytest.mark.conformance
def test_pixels_equal_pillow_at_every_small_size() -> None:
    for kind in KINDS.values():
        for width in range(1, 41):
            for height in range(1, 41):
                encoded = images.encode(images.random_image(width, height, seed=width), "JPEG", **kind)
                ours = jpeg.decode(encoded, height, width)
                assert ours is not None
                assert np.array_equal(ours, _by_pillow(encoded)), (width, height, kind)


def test_unusual_jpegs_are_left_to_pillow() -> None:
    sound = images.encode(images.random_image(64, 48), "JPEG")
    assert jpeg.decode(sound, 48, 64) is not None
    assert jpeg.decode(sound, 48, 65) is None
    assert jpeg.decode(sound[: len(sound) // 2], 48, 64) is None
    assert jpeg.decode(images.encode(images.random_image(64, 48, "CMYK"), "JPEG"), 48, 64) is None
    assert jpeg.decode(b"\xff\xd8\xff", 48, 64) is None
    with pytest.raises(InvalidImage):
        decode(sound[: len(sound) // 2], ImageLimits())
