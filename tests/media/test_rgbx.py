"""Memory of four bytes a pixel."""

import images
import numpy as np
import pytest

from saccade.media import rgbx
from saccade.media.decode import decode
from saccade.media.header import ImageLimits


def test_a_decoded_image_knows_its_memory() -> None:
    image = decode(images.encode(images.random_image(33, 21), "WEBP", lossless=True), ImageLimits())
    memory = rgbx.words(image)
    assert memory is not None
    assert np.shares_memory(memory, image)
    np.testing.assert_array_equal(memory[..., :3], images.draw(33, 21))


@pytest.mark.parametrize("kind", ["packed", "part", "mirrored", "other channels", "read from bytes"])
def test_other_memory_has_no_words(kind: str) -> None:
    memory = rgbx.empty(8, 8)
    image = {
        "packed": np.zeros((8, 8, 3), np.uint8),
        "part": memory[:4, :, :3],
        "mirrored": memory[::-1, :, :3],
        "other channels": memory[..., 1:],
        "read from bytes": np.frombuffer(bytes(192), np.uint8).reshape(8, 8, 3),
    }[kind]
    assert rgbx.words(image) is None


def test_split_equals_indexing() -> None:
    memory = rgbx.empty(7, 9)
    memory[...] = images.draw(9, 7, 4)
    planes = np.empty((3, 7, 9), np.uint8)
    rgbx.split(memory, planes)
    np.testing.assert_array_equal(planes, memory[..., :3].transpose(2, 0, 1))
