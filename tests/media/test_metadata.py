"""JPEGs with stray bytes between segments are what they are to Pillow; metadata and stray bytes go together."""

import io
import warnings

import attacks
import images
import jpegs
import numpy as np
import pytest
from PIL import Image
from tables import table

from saccade.errors import ImageTooLarge, InvalidImage
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header
from saccade.media.jpeg_header import MAX_JPEG_GAP_BYTES
from saccade.media.metadata import without_metadata

LIMITS = ImageLimits()
PLAIN = images.encode(images.random_image(24, 17), "JPEG")
WITHOUT_JFIF = jpegs.SOI + PLAIN[2 + len(jpegs.JFIF) :]
PROGRESSIVE = images.encode(images.random_image(24, 17), "JPEG", progressive=True)
RESTARTS = images.encode(images.random_image(64, 64), "JPEG", restart_marker_blocks=2)
KINDS = {
    "JFIF first": PLAIN,
    "no JFIF": WITHOUT_JFIF,
    "progressive": PROGRESSIVE,
    "grey": images.encode(images.random_image(24, 17, "L"), "JPEG"),
    "CMYK": images.encode(images.random_image(24, 17, "CMYK"), "JPEG"),
    "restarts": RESTARTS,
}
METADATA = {
    "APP13": attacks.segment(0xED, b"x" * 10),
    "comment": attacks.segment(0xFE, b"hello"),
    "XMP": attacks.segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
    "Exif": attacks.segment(0xE1, attacks.EXIF),
    "profile": attacks.segment(0xE2, b"ICC_PROFILE\0\1\1" + b"x" * 200),
    "JFXX": attacks.segment(0xE0, b"JFXX\0\x10"),
    "none": b"",
}
STRAY = {
    "one": b"\0", "two": b"\0\0", "a line end": b"\r\n", "many": b"\x10" * 5000, "fill": b"\xff", "fills": b"\xff" * 5000,
    "escaped": b"\xff\0\xff\0", "a fill among others": b"\1\xff\xff\0\2", "bytes and a fill": b"ab\xff",
}  # fmt: skip


def by_pillow(encoded: bytes) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(encoded)) as image:
            return np.asarray(image.convert("RGB"))


def turned_by_pillow(encoded: bytes) -> np.ndarray:
    return np.rot90(by_pillow(encoded), -1) if attacks.EXIF in encoded else by_pillow(encoded)


def assert_as_pillow(encoded: bytes) -> None:
    """Assert that *encoded* has the pixels that Pillow reads, or is refused as damaged like there."""
    try:
        expected = by_pillow(encoded)
    except OSError:
        with pytest.raises(InvalidImage, match="damaged or truncated"):
            decode(encoded, LIMITS)
    else:
        assert np.array_equal(decode(encoded, LIMITS), expected)


@table("metadata", METADATA)
@table("stray", STRAY)
@table("kind", KINDS)
def test_stray_bytes_after_every_segment_are_skipped(kind: str, stray: str, metadata: str) -> None:
    whole = jpegs.SOI + METADATA[metadata] + KINDS[kind][2:]
    encoded = jpegs.with_stray_bytes(whole, lambda _, marker: STRAY[stray])
    assert np.array_equal(decode(encoded, LIMITS), turned_by_pillow(encoded))
    assert np.array_equal(decode(encoded, LIMITS), decode(whole, LIMITS))


@table("position", range(8))
@table("metadata", ["APP13", "comment"])
def test_stray_bytes_after_one_segment_are_skipped(metadata: str, position: int) -> None:
    for kind in ("JFIF first", "no JFIF", "progressive"):
        whole = jpegs.SOI + METADATA[metadata] + KINDS[kind][2:]
        encoded = jpegs.with_stray_bytes(whole, lambda index, _: b"\0\0" if index == position else b"")
        assert np.array_equal(decode(encoded, LIMITS), by_pillow(encoded)), kind


@table("stray", STRAY)
def test_stray_bytes_between_scans_are_left_to_the_decoder(stray: str) -> None:
    assert_as_pillow(jpegs.between_scans(PROGRESSIVE, STRAY[stray]))


@table("stray", [b"\0", b"ab", b"\xff\0", b"\xff"])
def test_stray_bytes_around_restarts_are_left_to_the_decoder(stray: bytes) -> None:
    for marker in range(0xD0, 0xD8):
        for encoded in (
            RESTARTS.replace(bytes([0xFF, marker]), bytes([0xFF, marker]) + stray),
            RESTARTS.replace(bytes([0xFF, marker]), stray + bytes([0xFF, marker])),
        ):
            assert_as_pillow(encoded)


def test_what_the_decoder_gets_has_neither_metadata_nor_stray_bytes() -> None:
    for kind, whole in KINDS.items():
        described = jpegs.SOI + b"".join(METADATA.values()) + whole[2:]
        encoded = jpegs.with_stray_bytes(described, lambda *_: b"stray")
        assert without_metadata(encoded, "JPEG") == without_metadata(whole, "JPEG"), kind
    assert without_metadata(PLAIN, "JPEG") is PLAIN


def test_stray_bytes_have_a_bound() -> None:
    assert read_header(jpegs.with_stray_bytes(PLAIN, lambda *_: bytes(MAX_JPEG_GAP_BYTES // 10))).upright == (24, 17)
    for stray in (b"\0", b"\xff", b"\xff\0"):
        with pytest.raises(InvalidImage, match="header is damaged"):
            read_header(jpegs.with_stray_bytes(PLAIN, lambda *_, stray=stray: stray * MAX_JPEG_GAP_BYTES))


def _compare(seed: int, number: int) -> tuple[int, int]:
    """Compare random JPEGs with Pillow; return how many both read, and how many are refused."""
    generator = np.random.default_rng(seed)
    wholes, read, refused = [*KINDS.values()], 0, 0
    for _ in range(number):
        extra = [metadata for metadata in METADATA.values() if generator.integers(2)]
        whole = jpegs.SOI + b"".join(extra) + wholes[generator.integers(len(wholes))][2:]
        letters = np.frombuffer(b"\0\1a\xff\xff\xd0\xda\xd8\xc0\xe1", np.uint8)[: generator.integers(3, 11)]
        encoded = bytearray(
            jpegs.with_stray_bytes(whole, lambda *_, a=letters: generator.choice(a, generator.integers(6)).tobytes())
        )
        if generator.integers(4) == 0:
            encoded[generator.integers(4, len(encoded))] = generator.integers(256)
        try:
            expected = turned_by_pillow(bytes(encoded))
        except Exception:
            refused += 1
            continue
        if attacks.EXIF in whole and attacks.EXIF not in encoded:
            continue
        try:
            assert np.array_equal(decode(bytes(encoded), LIMITS), expected), bytes(encoded)[:400]
        except ImageTooLarge:
            continue
        except InvalidImage as error:
            raise AssertionError(bytes(encoded)[:400]) from error
        read += 1
    return read, refused


def test_what_pillow_reads_of_random_stray_bytes_is_read_equally() -> None:
    read, refused = _compare(1, 600)
    assert read > 100
    assert refused > 20


@pytest.mark.conformance
@table("seed", range(2, 12))
def test_what_pillow_reads_of_many_random_stray_bytes_is_read_equally(seed: int) -> None:
    _compare(seed, 1000)
