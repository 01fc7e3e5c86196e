"""PNG without Pillow is PNG as Pillow decodes it, bit for bit."""

import io
import struct
import zlib
from typing import Any

import images
import numpy as np
import pytest
from PIL import Image
from tables import table

from saccade.media import png
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, png_chunks

KINDS: dict[str, dict[str, Any]] = {"usual": {}, "optimised": {"optimize": True}, "stored": {"compress_level": 0}}
SIZES = ((1, 1), (7, 5), (8, 8), (16, 17), (33, 31), (130, 97), (641, 479), (2, 600), (600, 2))
SOUND = images.encode(images.random_image(64, 48))


def _by_pillow(encoded: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image)


def _filtered(width: int, height: int, channels: int, seed: int) -> bytes:
    """Return a PNG whose rows are filtered in all five ways, whatever they mean."""
    rows = np.random.default_rng(seed).integers(0, 256, (height, 1 + width * channels), dtype=np.uint8)
    rows[:, 0] = np.arange(height) % 5
    encoded = bytearray(images.png(width, height, rows.tobytes()))
    encoded[25] = 2 if channels == 3 else 6
    return _with_checksums(bytes(encoded))


def _with_checksums(encoded: bytes) -> bytes:
    pieces = [encoded[start : end - 4] for _, start, end in png_chunks(encoded)]
    return images.PNG_SIGNATURE + b"".join(piece + struct.pack(">I", zlib.crc32(piece[4:])) for piece in pieces)


@table("kind", KINDS)
@table("mode", png.PLAIN)
def test_pixels_equal_pillow(kind: str, mode: str) -> None:
    for seed, (width, height) in enumerate(SIZES):
        encoded = images.encode(images.random_image(width, height, mode, seed), **KINDS[kind])
        ours = png.decode(encoded, height, width, mode)
        assert ours is not None
        np.testing.assert_array_equal(ours, _by_pillow(encoded))


@pytest.mark.parametrize("mode", png.PLAIN)
def test_every_filter_equals_pillow(mode: str) -> None:
    for width in range(1, 40):
        encoded = _filtered(width, 23, len(mode), seed=width)
        ours = png.decode(encoded, 23, width, mode)
        assert ours is not None
        np.testing.assert_array_equal(ours, _by_pillow(encoded))


@table(
    "encoded",
    [
        *(images.encode(images.random_image(64, 48, mode)) for mode in ("L", "LA", "P", "I;16", "1", "RGBA")),
        images.encode(images.random_image(64, 48), transparency=(1, 2, 3)),
        SOUND[:28] + b"\1" + SOUND[29:],
        SOUND[: len(SOUND) // 2],
        SOUND[:-20] + bytes(20),
        SOUND[:36],
        b"",
    ],
    ids=[
        "L",
        "LA",
        "P",
        "I;16",
        "1",
        "RGBA",
        "one transparent colour",
        "interlaced",
        "cut",
        "no end",
        "header",
        "none",
    ],
)
def test_unusual_pngs_are_left_to_pillow(encoded: bytes) -> None:
    assert png.decode(SOUND, 48, 64) is not None
    assert png.decode(encoded, 48, 64) is None


def test_another_size_is_not_decoded() -> None:
    assert png.decode(SOUND, 64, 48) is None


def test_opaque_pixels_stay_and_transparent_ones_lie_on_white() -> None:
    image = images.random_image(70, 200)
    image.putalpha(255)
    opaque = decode(images.encode(image), ImageLimits())
    np.testing.assert_array_equal(opaque, np.asarray(image)[..., :3])
    image.putpixel((3, 150), (1, 2, 3, 0))
    changed = decode(images.encode(image), ImageLimits())
    assert changed[150, 3].tolist() == [255, 255, 255]
    assert (changed != opaque).any(-1).sum() == 1


def _damaged(seed: int, number: int) -> list[tuple[str, bytes]]:
    """Return *number* small images with one to four bytes changed, checksums of chunks made to fit in most."""
    generator = np.random.default_rng(seed)
    sound = [
        (mode, images.encode(images.random_image(20, 15, mode, seed), **kind))
        for mode in png.PLAIN
        for kind in KINDS.values()
    ]
    damaged = []
    for index in range(number):
        mode, whole = sound[index % len(sound)]
        encoded = bytearray(whole)
        for position in generator.integers(41, len(encoded) - 16, generator.integers(1, 5)):
            encoded[position] = generator.integers(0, 256)
        damaged.append((mode, bytes(encoded) if index % 4 == 0 else _with_checksums(bytes(encoded))))
    return damaged


def _agree(seed: int, number: int) -> None:
    both = 0
    for mode, encoded in _damaged(seed, number):
        ours = png.decode(encoded, 15, 20, mode)
        try:
            pillows = _by_pillow(encoded)
        except (OSError, SyntaxError):
            continue
        if ours is not None:
            both += 1
            np.testing.assert_array_equal(ours, pillows)
    assert both > 0


def test_damaged_pixels_equal_pillow_or_fail() -> None:
    _agree(0, 600)


@pytest.mark.conformance
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_more_damaged_pixels(seed: int) -> None:
    _agree(seed, 20_000)


def test_a_wrong_checksum_of_a_chunk_is_left_to_pillow() -> None:
    start = SOUND.index(b"IDAT")
    damaged = bytearray(SOUND)
    damaged[start + 100] ^= 1
    assert png.decode(bytes(damaged), 48, 64) is None
