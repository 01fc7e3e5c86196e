"""Memory of four bytes a pixel."""

import numpy as np
import pictures
import pytest

from saccade.media import rgbx
from saccade.media.decode import decode
from saccade.media.header import PictureLimits


def test_a_decoded_picture_knows_its_memory() -> None:
    picture = decode(pictures.encode(pictures.picture(33, 21), "WEBP", lossless=True), PictureLimits())
    memory = rgbx.words(picture)
    assert memory is not None
    assert np.shares_memory(memory, picture)
    np.testing.assert_array_equal(memory[..., :3], pictures.draw(33, 21))


@pytest.mark.parametrize("kind", ["packed", "part", "mirrored", "other channels", "read from bytes"])
def test_other_pictures_have_none(kind: str) -> None:
    memory = rgbx.empty(8, 8)
    picture = {
        "packed": np.zeros((8, 8, 3), np.uint8),
        "part": memory[:4, :, :3],
        "mirrored": memory[::-1, :, :3],
        "other channels": memory[..., 1:],
        "read from bytes": np.frombuffer(bytes(192), np.uint8).reshape(8, 8, 3),
    }[kind]
    assert rgbx.words(picture) is None


def test_split_equals_indexing() -> None:
    memory = rgbx.empty(7, 9)
    memory[...] = pictures.draw(9, 7, 4)
    planes = np.empty((3, 7, 9), np.uint8)
    rgbx.split(memory, planes)
    np.testing.assert_array_equal(planes, memory[..., :3].transpose(2, 0, 1))
