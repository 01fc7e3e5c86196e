"""Images in conversations from Python."""

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tables import table

from saccade.errors import InvalidImage, InvalidImageUrl, InvalidValue
from saccade.llm.conversation import Source, load, num_bytes, read_messages
from saccade.media.decode import decode
from saccade.media.header import ImageLimits

PIXELS = np.arange(3 * 40 * 50, dtype=np.uint8).reshape(40, 50, 3)


def image(mode: str) -> Image.Image:
    """An image of *mode*."""
    if mode in ("RGBa", "La"):
        return Image.fromarray(PIXELS).convert({"RGBa": "RGBA", "La": "LA"}[mode]).convert(mode)
    return Image.fromarray(PIXELS).convert(mode)


@table("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "RGBa"])
def test_pixels_become_a_file_that_decodes_to_them(mode: str) -> None:
    pixels = decode(load(image(mode)), ImageLimits())
    assert np.array_equal(pixels, np.asarray(image(mode).convert("RGB")))


def test_transparent_pixels_are_those_of_the_same_file() -> None:
    transparent = Image.fromarray(np.dstack([PIXELS, PIXELS[:, :, 0]]))
    file = io.BytesIO()
    transparent.save(file, "PNG")
    assert np.array_equal(decode(load(transparent), ImageLimits()), decode(file.getvalue(), ImageLimits()))


def test_opened_photo_is_upright_as_its_file_is(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(tmp_path / "photo.png", exif=exif)
    with Image.open(tmp_path / "photo.png") as opened:
        pixels = decode(load(opened), ImageLimits())
    assert pixels.shape == (50, 40, 3)
    assert np.array_equal(pixels, decode(load(tmp_path / "photo.png"), ImageLimits()))


def test_parts_of_all_spellings_name_their_images(tmp_path: Path) -> None:
    pixels, path, url = image("RGB"), tmp_path / "a b.png", "https://images.example/a.png"
    parts = [
        {"type": "image", "image": pixels},
        {"type": "image_pil", "image_pil": pixels},
        {"type": "image_url", "image_url": {"url": path, "detail": "low"}},
        {"type": "image", "image": str(path)},
        {"type": "image_url", "image_url": path.as_uri()},
        {"type": "image", "image": b"bytes"},
        {"type": "video", "video": path},
        {"type": "image", "image": url},
        {"type": "text", "text": "What?"},
    ]
    system = {"role": "system", "content": "Be brief."}
    (first, read), sources = read_messages([system, {"role": "user", "content": parts}])
    assert first == system
    names = list(sources)
    assert list(sources.values()) == [pixels, pixels, path, path, path, b"bytes", path]
    assert read["content"] == [
        {"type": "image_url", "image_url": {"url": names[0]}},
        {"type": "image_url", "image_url": {"url": names[1]}},
        {"type": "image_url", "image_url": {"url": names[2], "detail": "low"}},
        {"type": "image_url", "image_url": {"url": names[3]}},
        {"type": "image_url", "image_url": {"url": names[4]}},
        {"type": "image_url", "image_url": {"url": names[5]}},
        {"type": "video_url", "video_url": {"url": names[6]}},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What?"},
    ]


def _source_of(image: object) -> Source:
    _, sources = read_messages([{"role": "user", "content": [{"type": "image", "image": image}]}])
    return sources.popitem()[1]


@table(
    ("pixels", "expected"),
    [
        (PIXELS, PIXELS),
        (PIXELS[::2, ::-1], PIXELS[::2, ::-1]),
        (PIXELS[:, :, 1], np.repeat(PIXELS[:, :, 1:2], 3, 2)),
        (np.dstack([PIXELS, np.full((40, 50), 255, np.uint8)]), PIXELS),
    ],
)
def test_array_of_pixels_is_an_image(pixels: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert np.array_equal(decode(load(_source_of(pixels)), ImageLimits()), expected)


@table(
    ("image", "sentence"),
    [
        (PIXELS / 255, "not float64 [40, 50, 3]"),
        (PIXELS.transpose(2, 0, 1), "not uint8 [3, 40, 50]"),
        (PIXELS[None], "not uint8 [1, 40, 50, 3]"),
        (PIXELS[:0], "not uint8 [0, 50, 3]"),
        (object(), "not of type object"),
        (None, "not of type NoneType"),
    ],
)
def test_object_that_is_no_image_is_refused(image: object, sentence: str) -> None:
    with pytest.raises(InvalidValue, match=re.escape(sentence)):
        _source_of(image)


@table(
    ("source", "sentence"),
    [
        (Path("missing.png"), "Cannot read missing.png: No such file or directory."),
        (Path("x" * 5000), f"Cannot read {'x' * 200}: File name too long."),
        (Path("a\0b"), "Cannot read a\0b: that is no path."),
        (Path("."), "Cannot read .: Is a directory."),
    ],
)
def test_file_that_cannot_be_read_is_named(source: Path, sentence: str) -> None:
    num_bytes(source)
    with pytest.raises(InvalidImageUrl) as error:
        load(source)
    assert error.value.message == sentence


def test_image_whose_file_is_closed_is_refused(tmp_path: Path) -> None:
    image("RGB").save(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as opened:
        pass
    with pytest.raises(InvalidImage, match="damaged or closed"):
        load(opened)
