"""Headers read without decoding, against Pillow."""

import io
import struct

import images
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tables import table

from saccade.errors import ImageTooLarge, InvalidImage, RequestError, UnsupportedImageFormat
from saccade.media.header import MAX_STEPS, ImageHeader, ImageLimits, read_header

CORPUS = images.corpus()
SAMPLES = {
    kind: images.encode(images.random_image(40, 30), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP")
}


@table("name", CORPUS)
def test_header_agrees_with_pillow(name: str) -> None:
    header = read_header(CORPUS[name])
    with Image.open(io.BytesIO(CORPUS[name])) as image:
        assert (header.format.upper(), header.width, header.height) == (image.format, *image.size)
        assert header.upright == ImageOps.exif_transpose(image).size


def _exif(order: str, kind: int, value: int) -> bytes:
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    content = struct.pack(order + {3: "H2x", 4: "I"}[kind], value)
    return b"Exif\0\0" + mark + struct.pack(order + "IHHHI", 8, 1, images.ORIENTATION, kind, 1) + content + bytes(4)


@table("order", ["<", ">"])
@table("kind", [3, 4])
@table(("value", "expected"), [(6, 6), (8, 8), (0, 1), (9, 1)])
def test_orientation_in_either_byte_order_and_any_integer(order: str, kind: int, value: int, expected: int) -> None:
    encoded = images.encode(images.random_image(40, 30), "JPEG", exif=_exif(order, kind, value))
    assert read_header(encoded).orientation == expected


@table("cut", range(6, len(_exif("<", 3, 6))))
def test_broken_exif_means_upright(cut: int) -> None:
    encoded = images.encode(images.random_image(40, 30), "JPEG", exif=_exif("<", 3, 6)[:cut])
    assert read_header(encoded).orientation in (1, 6)


def test_exif_after_the_pixels_of_a_png_counts() -> None:
    whole = images.turned(6, "PNG")
    start = whole.index(b"eXIf") - 4
    length = 12 + int.from_bytes(whole[start : start + 4], "big")
    moved = whole[:start] + whole[start + length : -12] + whole[start : start + length] + whole[-12:]
    assert read_header(moved).orientation == 6


def test_a_first_frame_wider_than_its_gif_counts() -> None:
    whole = bytearray(SAMPLES["GIF"])
    whole[6:10] = struct.pack("<HH", 10, 10)
    with Image.open(io.BytesIO(whole)) as image:
        assert read_header(bytes(whole)).upright == image.size == (40, 30)


@table(
    ("start", "name"),
    [
        (b"II*\0\x08\0\0\0", "TIFF"), (b"MM\0*\0\0\0\x08", "TIFF"), (b"%PDF-1.7", "PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"), (b"8BPS\0\x01", "PSD"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"), (b"<?xml version='1.0'?>\n<svg/>", "SVG"),
        (b"<!DOCTYPE html><p>not found</p>", "HTML"), (b"\0\0\x01\0\x01\0", "ICO"), (b"\xff\x0a\0\0", "JPEG XL"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"), (b"\0\0\0\x18ftypisom", "MP4"), (b"hello", "not an image"),
    ],
)  # fmt: skip
def test_other_kinds_are_refused_by_name(start: bytes, name: str) -> None:
    with pytest.raises(UnsupportedImageFormat, match=rf"{name}.*JPEG, PNG, WebP, GIF, AVIF or BMP"):
        read_header(start)


@pytest.mark.parametrize("kind", SAMPLES)
def test_a_cut_header_is_invalid(kind: str) -> None:
    for length in range(12, 40):
        if length < len(SAMPLES[kind]):
            try:
                header = read_header(SAMPLES[kind][:length])
            except InvalidImage:
                continue
            assert (header.width, header.height) == (40, 30)


@table(
    "encoded",
    [
        b"",
        images.png(0, 5),
        images.png(5, 0),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8" + b"\xff\xe0\0\x02" * 10_000_000,
        b"\xff\xd8" + b"\xff" * 10_000_000,
        b"GIF89a" + bytes(7) + b"!\xfe" + b"\x01x" * 10_000_000,
        b"GIF89a\x05\0\x05\0\0\0\0" + b"!\xf9\0" * 10_000_000,
        b"RIFF\0\0\0\0WEBPVP8 " + bytes(40),
        b"RIFF\0\0\0\0WEBPVP8X" + bytes(4),
    ],
)
def test_hostile_headers_are_invalid(encoded: bytes) -> None:
    with pytest.raises(InvalidImage):
        read_header(encoded)


def test_the_walk_over_chunks_is_bounded() -> None:
    """An orientation that stands behind more chunks than are walked is not found, however many there are."""
    chunks = [(b"zzZz", b"")] * (MAX_STEPS + 1)
    exif = (b"eXIf", _exif("<", 3, 6))
    assert read_header(images.png(4, 3, chunks=[*chunks[:100], exif])).orientation == 6
    assert read_header(images.png(4, 3, chunks=[*chunks, exif])).orientation == 1


@given(kind=st.sampled_from(sorted(SAMPLES)), data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_header_or_a_request_error(kind: str, data: st.DataObject) -> None:
    encoded = bytearray(SAMPLES[kind])
    for _ in range(data.draw(st.integers(1, 8))):
        encoded[data.draw(st.integers(0, min(80, len(encoded) - 1)))] = data.draw(st.integers(0, 255))
    try:
        header = read_header(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))
    except RequestError as error:
        assert error.message.endswith(".")  # noqa: PT017
    else:
        assert header.width > 0
        assert header.height > 0


@table(
    ("width", "height", "encoded_bytes", "fits"),
    [
        (1280, 960, 300_000, True), (32_768, 1_500, 9, True), (20_000, 20_000, 9, False), (9_000, 9_000, 9, False),
        (32_769, 100, 9, False), (1, 65_500, 9, False), (1, 20_000, 9, True), (9, 9, (64 << 20) + 1, False),
    ],
)  # fmt: skip
def test_size_limits(width: int, height: int, encoded_bytes: int, fits: bool) -> None:
    header = ImageHeader("PNG", width, height)
    if fits:
        ImageLimits().check_header(header, encoded_bytes)
    else:
        with pytest.raises(ImageTooLarge, match=r"at most"):
            ImageLimits().check_header(header, encoded_bytes)


def test_an_image_of_too_many_pixels_is_told_their_number_and_the_flag() -> None:
    with pytest.raises(ImageTooLarge, match=r"81,000,000 in all; at most 50,000,000 .*--max-image-pixels"):
        ImageLimits().check_header(ImageHeader("PNG", 9_000, 9_000), 9)


def test_the_limit_of_the_aspect() -> None:
    ImageLimits(max_aspect=200).check_header(ImageHeader("PNG", 200, 1), 9)
    with pytest.raises(ImageTooLarge, match="200 times"):
        ImageLimits(max_aspect=200).check_header(ImageHeader("PNG", 1, 201), 9)


@table("orientation", range(1, 9))
def test_an_avif_turns_by_its_own_boxes(orientation: int) -> None:
    encoded = images.turned(orientation, "AVIF")
    with Image.open(io.BytesIO(encoded)) as image:
        header = read_header(encoded)
        assert header.upright == ImageOps.exif_transpose(image).size
        assert header.orientation == image.getexif().get(images.ORIENTATION, 1) == orientation
