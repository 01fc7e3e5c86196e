"""Resampling, against the reference processors' resize."""

import random
from collections.abc import Callable
from typing import get_args

import images
import numpy as np
import numpy.typing as npt
import pytest
import torch
from tables import table
from torch.nn import functional

from saccade.media import resize as module
from saccade.media import rgbx
from saccade.media.exact_resize import Mode, resize_planes
from saccade.media.resize import MAX_SHRINKING, resize

Resize = Callable[[npt.NDArray[np.uint8], int, int, Mode], npt.NDArray[np.uint8]]
WAYS: tuple[Resize, ...] = (resize, resize_planes)


def _reference(image: npt.NDArray[np.uint8], height: int, width: int, mode: Mode) -> npt.NDArray[np.uint8]:
    """Return *image* [old height, old width, 3] as planes, resized by torch as torchvision calls it."""
    pixels_NCHW = torch.from_numpy(image.transpose(2, 0, 1)[None].copy())
    return functional.interpolate(pixels_NCHW, (height, width), mode=mode, antialias=True)[0].numpy()


def _noise(width: int, height: int, only_extremes: bool = False) -> npt.NDArray[np.uint8]:
    drawn = np.random.default_rng(width * 70_001 + height).integers(0, 256, (height, width, 3), np.uint8)
    return (drawn >> 7) * np.uint8(255) if only_extremes else drawn


@table(
    ("width", "height", "new_width", "new_height"),
    [(1, 1, 32, 32), (75, 51, 64, 64), (51, 75, 512, 32), (640, 481, 640, 480), (300, 200, 96, 64), (33, 900, 32, 928)],
)
@table("mode", get_args(Mode))
@table("way", WAYS)
def test_resize_is_bit_equal_to_torchvision(
    width: int, height: int, new_width: int, new_height: int, mode: Mode, way: Resize
) -> None:
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import resize as reference

    drawn = images.draw(width, height)
    planes = torch.from_numpy(np.ascontiguousarray(drawn.transpose(2, 0, 1)))
    expected = reference(planes, [new_height, new_width], InterpolationMode(mode), antialias=True)
    np.testing.assert_array_equal(way(drawn, new_height, new_width, mode), expected.numpy())


@pytest.mark.parametrize("mode", get_args(Mode))
def test_random_sizes_are_bit_equal(mode: Mode) -> None:
    """Noise of black and white has the largest sums; most sizes are of images, and some of lines."""
    draw = random.Random(mode)
    for number in range(120):
        width, height, new_width, new_height = (draw.randint(1, draw.choice([20, 150, 500])) for _ in range(4))
        drawn = _noise(width, height, only_extremes=number % 3 == 0)
        expected = _reference(drawn, new_height, new_width, mode)
        for way in WAYS:
            assert np.array_equal(way(drawn, new_height, new_width, mode), expected), (
                way, width, height, new_width, new_height,
            )  # fmt: skip


@table(
    ("width", "height", "new_width", "new_height"),
    [
        (8192, 3, 64, 5),  # 128 times, the largest weight below 15 bits
        (8192, 3, 63, 5),
        (8192, 2, 1, 2),  # sums of more than 24 bits
        (2, 20_000, 3, 7),
        (MAX_SHRINKING * 40, 4, 40, 4),
        (MAX_SHRINKING * 40 + 1, 4, 40, 4),
        (4, MAX_SHRINKING * 40 + 1, 4, 40),
        (1, 1, 1, 8192),
        (3, 2, 8192, 2),
        (8192, 8, 8191, 8),
    ],
)
@table("mode", get_args(Mode))
@table("way", WAYS)
def test_extreme_sizes_are_bit_equal(
    width: int, height: int, new_width: int, new_height: int, mode: Mode, way: Resize
) -> None:
    drawn = _noise(width, height)
    np.testing.assert_array_equal(
        way(drawn, new_height, new_width, mode), _reference(drawn, new_height, new_width, mode)
    )


@table("way", WAYS)
def test_memory_of_four_bytes_a_pixel_resizes_alike(way: Resize) -> None:
    memory = rgbx.empty(51, 75)
    memory[..., :3] = images.draw(75, 51)
    memory[..., 3] = _noise(75, 51)[..., 0]
    expected = _reference(images.draw(75, 51), 64, 96, "bicubic")
    np.testing.assert_array_equal(way(memory[..., :3], 64, 96, "bicubic"), expected)


def test_the_given_image_stays_as_it_is() -> None:
    memory = rgbx.empty(51, 75)
    memory[:] = 7
    resize(memory[..., :3], 64, 96)
    assert (memory == 7).all()


def test_the_same_size_is_a_view() -> None:
    drawn = images.draw(64, 32)
    planes = resize(drawn, 32, 64)
    assert planes.shape == (3, 32, 64)
    assert np.shares_memory(planes, drawn)


def test_a_processor_without_the_fast_passes_resizes_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = resize(images.draw(64, 32), 20, 30)
    monkeypatch.setattr(module, "HAS_FAST_PASSES", False)
    monkeypatch.delattr(module, "fast_passes", raising=False)
    np.testing.assert_array_equal(resize(images.draw(64, 32), 20, 30), fast)
