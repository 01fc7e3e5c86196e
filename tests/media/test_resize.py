"""Resampling, against the reference processors' resize."""

from typing import Any, get_args

import images
import numpy as np
import pytest
import torch
from tables import table

from saccade.errors import InternalError
from saccade.media import rgbx
from saccade.media.resize import Mode, resize


@table(
    ("width", "height", "new_width", "new_height"),
    [(1, 1, 32, 32), (75, 51, 64, 64), (51, 75, 512, 32), (640, 481, 640, 480), (300, 200, 96, 64), (33, 900, 32, 928)],
)
@table("mode", get_args(Mode))
def test_resize_is_bit_equal_to_torchvision(
    width: int, height: int, new_width: int, new_height: int, mode: Mode
) -> None:
    from torchvision.transforms.v2 import InterpolationMode, functional

    drawn = images.draw(width, height)
    planes = torch.from_numpy(np.ascontiguousarray(drawn.transpose(2, 0, 1)))
    expected = functional.resize(planes, [new_height, new_width], InterpolationMode(mode), antialias=True)
    np.testing.assert_array_equal(resize(drawn, new_height, new_width, mode), expected.numpy())


def test_memory_of_four_bytes_a_pixel_resizes_alike() -> None:
    memory = rgbx.empty(51, 75)
    memory[..., :3] = images.draw(75, 51)
    np.testing.assert_array_equal(resize(memory[..., :3], 64, 96), resize(images.draw(75, 51), 64, 96))


def test_the_same_size_is_a_view() -> None:
    drawn = images.draw(64, 32)
    planes = resize(drawn, 32, 64)
    assert planes.shape == (3, 32, 64)
    assert np.shares_memory(planes, drawn)


def test_a_torch_without_the_filter_is_named() -> None:
    unknown: Any = "sinc"  # what Lanczos is before torch 2.12
    with pytest.raises(InternalError, match=r"torch 2\.12"):
        resize(images.draw(64, 32), 32, 32, unknown)
