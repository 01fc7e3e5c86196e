"""Pillow resampling, pass by pass. A2"""

import io

import images
import numpy as np
from PIL import Image
from tables import table

from saccade.media import rgbx
from saccade.media.decode import decode
from saccade.media.header import ImageLimits
from saccade.media.resample import resample

KERNELS = (Image.Resampling.BICUBIC, Image.Resampling.BILINEAR)


def _rows_alone(image: np.ndarray, width: int, kernel: Image.Resampling) -> np.ndarray:
    """Each row resized as an image of its own, for which there is no other pass."""
    return np.concatenate([np.asarray(Image.fromarray(row[None]).resize((width, 1), kernel)) for row in image])


@table("kernel", KERNELS)
@table(
    ("width", "height", "new_width", "new_height"),
    [(1, 1, 28, 28), (60, 40, 75, 33), (40, 60, 33, 75), (100, 30, 112, 30), (30, 100, 30, 50), (90, 1, 45, 1)],
)
def test_passes_are_horizontal_then_vertical(
    width: int, height: int, new_width: int, new_height: int, kernel: Image.Resampling
) -> None:
    drawn = images.draw(width, height)
    narrow = _rows_alone(drawn, new_width, kernel)
    expected = _rows_alone(narrow.transpose(1, 0, 2).copy(), new_height, kernel).transpose(1, 0, 2)
    np.testing.assert_array_equal(resample(drawn, new_height, new_width, kernel), expected)


def test_a_view_of_any_memory_is_resampled_alike() -> None:
    drawn = images.draw(64, 48)
    memory = rgbx.empty(48, 64)
    memory[...] = 77
    memory[..., :3] = drawn
    turned = drawn.transpose(1, 0, 2).copy().transpose(1, 0, 2)
    expected = resample(drawn, 30, 50, Image.Resampling.BICUBIC)
    for view in (memory[..., :3], turned):
        np.testing.assert_array_equal(resample(view, 30, 50, Image.Resampling.BICUBIC), expected)


def test_decoded_image_keeps_its_alpha() -> None:
    """A decoder's memory has four bytes a pixel, whether the fourth is alpha or unused."""
    drawn = np.random.default_rng(1).integers(0, 256, (60, 80, 4), np.uint8)
    for file_format in ("PNG", "WEBP"):
        encoded = io.BytesIO()
        Image.fromarray(drawn).save(encoded, file_format, lossless=True)
        decoded = decode(encoded.getvalue(), ImageLimits(), keeps_alpha=True)
        resized = resample(decoded, 30, 50, Image.Resampling.BICUBIC)
        assert resized.shape == (30, 50, 4)
        np.testing.assert_array_equal(resized, resample(decoded.copy(), 30, 50, Image.Resampling.BICUBIC))
        assert resized[..., 3].min() < 255


def test_colours_are_weighted_by_alpha() -> None:
    drawn = np.concatenate([images.draw(64, 48), images.draw(48, 64)[..., :1].transpose(1, 0, 2)], axis=2)
    expected = Image.fromarray(drawn).convert("RGBa").resize((50, 48)).resize((50, 30)).convert("RGBA")
    np.testing.assert_array_equal(resample(drawn, 30, 50, Image.Resampling.BICUBIC), np.asarray(expected))


def test_the_same_size_is_not_copied() -> None:
    drawn = images.draw(64, 32)
    assert resample(drawn, 32, 64, Image.Resampling.BICUBIC) is drawn
