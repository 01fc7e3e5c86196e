"""Whatever the bytes are: pixels of the size the header says, or one of our own sentences."""

import re
import struct
from collections.abc import Iterator

import attacks
import bitmaps
import images
import numpy as np
import pytest
from tables import table

from saccade.errors import ImageTooLarge, InvalidImage, RequestError, UnsupportedImageFormat
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header

pytestmark = pytest.mark.ci

SENTENCES = re.compile(
    r"The (image|JPEG|PNG|WebP|GIF|AVIF|BMP) ("
    r"has no bytes|ends within its header: it is truncated|does not begin with its header|has no frame"
    r"|is damaged or truncated: its pixels could not be decoded|is damaged: its boxes are inconsistent"
    r"|has too many (scans|chunks|blocks before its first frame|boxes, properties or associations)"
    r"|has a crop box \(clap\), which is not supported; crop the image before you send it"
    r"|has \d+ x \d+ pixels(, [\d,]+ in all)?; (at most|a side may|its long side may be at most) .*"
    r"|has \d+ bytes; at most \d+ are accepted)\."
    r"|The JPEG is [\w ,-]+, which is not supported; send a baseline or progressive JPEG with 8 bits a sample, or "
    r"a PNG\."
    r"|The JPEG's header is (too long|damaged: no image data follows it)\."
    r"|The image's header states -?\d+ x -?\d+ pixels\."
    r"|The image begins like a BMP, but its header is damaged\."
    r"|The BMP (contains a (?P<kind>JPEG|PNG), which is not supported; send the (?P=kind) by itself|(has unusual masks of colours"
    r"|has \d+ bits a pixel in coding \d+), which is not supported; save it with 24 bits a pixel, or as PNG)\."
    r"|The BMP is truncated: (it has fewer bytes than its pixels take|its palette is cut"
    r"|its runs end before the image does)\.|The BMP's palette has \d+ colours; at most 256 are possible\."
    r"|The WebP's first chunk is damaged\.|Decoding the image takes more memory than an image may use\."
    r"|(The image looks like [\w .]+, which is not supported|The bytes are not an image in a known format); "
    r"(send it as `video_url` to a model that takes videos, or )?send JPEG, PNG, WebP, GIF, AVIF or BMP\."
)
KINDS = {
    "jpeg": images.encode(images.random_image(40, 30), "JPEG"),
    "jpeg progressive turned": images.encode(images.random_image(40, 30), "JPEG", progressive=True, exif=attacks.EXIF),
    "jpeg CMYK": images.encode(images.random_image(20, 30, "CMYK"), "JPEG"),
    "png": images.encode(images.random_image(20, 15, "RGBA"), "PNG", exif=attacks.EXIF),
    "png P tRNS": images.transparent_palette(),
    "png I;16": images.encode(images.random_image(20, 15, "I;16"), "PNG"),
    "apng": images.animation("PNG", size=(15, 10)),
    "webp": images.encode(images.random_image(40, 30), "WEBP", exif=attacks.EXIF),
    "webp alpha": images.encode(images.random_image(20, 15, "RGBA"), "WEBP", lossless=True),
    "webp animated": images.animation("WEBP", size=(15, 10)),
    "gif": images.encode(images.random_image(20, 15, "P"), "GIF", transparency=3),
    "gif animated": images.animation("GIF", size=(15, 10)),
    "avif": images.encode(images.random_image(40, 30), "AVIF", exif=attacks.EXIF),
    "avif alpha": images.encode(images.random_image(20, 15, "RGBA"), "AVIF"),
    "avif animated": images.animation("AVIF", size=(16, 10)),
    "bmp": images.encode(images.random_image(20, 15), "BMP"),
    "bmp P": bitmaps.corpus()["bmp of 5 colours with a gap"],
    "bmp masks": bitmaps.corpus()["bmp of BGRA in 32 bits, header 124"],
    "bmp runs": bitmaps.corpus()["bmp in runs of 8 bits"],
    "bmp runs of 4 bits": bitmaps.corpus()["bmp in runs of 4 bits"],
}
LIMITS = ImageLimits(max_pixels=4_000_000)


def holds(encoded: bytes, limits: ImageLimits = LIMITS) -> bool:
    """Decode *encoded*; return whether it is sound, and fail where it is neither that nor refused properly."""
    try:
        decoded = decode(encoded, limits)
    except RequestError as error:
        assert isinstance(error, (InvalidImage, ImageTooLarge, UnsupportedImageFormat))  # noqa: PT017
        assert SENTENCES.fullmatch(error.message), error.message  # noqa: PT017
        return False
    assert decoded.dtype == np.uint8
    assert decoded.shape == (*read_header(encoded).upright[::-1], 3)
    return True


@table("name", KINDS)
def test_cut_anywhere(name: str) -> None:
    assert holds(KINDS[name])
    for length in (*range(min(len(KINDS[name]), 120)), *range(120, len(KINDS[name]), 61)):
        holds(KINDS[name][:length])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "AVIF", "BMP"])
def test_cut_at_every_kilobyte(kind: str) -> None:
    whole = images.encode(images.random_image(200, 150, "P" if kind == "GIF" else "RGB"), kind)
    assert not any(holds(whole[:length]) for length in range(0, len(whole) - 12, 1024))


def flipped(name: str, seed: int, number: int) -> Iterator[bytes]:
    """Yield *number* copies of an image, each with one to eight bytes changed; half of those near its start."""
    generator = np.random.default_rng((seed, len(name)))
    whole = KINDS[name]
    for index in range(number):
        damaged = bytearray(whole)
        end = len(whole) if index % 2 else min(len(whole), 120)
        for position in generator.integers(4 if index % 4 else 0, end, generator.integers(1, 9)):
            damaged[position] = generator.integers(0, 256)
        yield bytes(damaged)


def spliced(seed: int, number: int) -> Iterator[bytes]:
    """Yield *number* images into which a piece of another one was put, or from which one was taken or doubled."""
    generator = np.random.default_rng(seed)
    names = list(KINDS)
    for _ in range(number):
        whole, other = (KINDS[names[generator.integers(len(names))]] for _ in range(2))
        start, end = sorted(generator.integers(0, len(whole), 2))
        first, last = sorted(generator.integers(0, len(other), 2))
        yield whole[:start] + other[first:last] + whole[[start, end, (start + end) // 2][generator.integers(3)] :]


@table("name", KINDS)
def test_flipped_bytes(name: str) -> None:
    for encoded in flipped(name, 1, 80):
        holds(encoded)


def test_spliced_images() -> None:
    for encoded in spliced(1, 300):
        holds(encoded)


@pytest.mark.conformance
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_random_damages(seed: int) -> None:
    for name in KINDS:
        for encoded in flipped(name, seed, 3000):
            holds(encoded)
    for encoded in spliced(seed, 20_000):
        holds(encoded)


def _sized(name: str, width: int, height: int) -> bytes:
    """Return an image whose header claims another size than its content has."""
    whole = bytearray(KINDS[name])
    frame = re.search(rb"\xff[\xc0\xc2]\0", whole)
    if frame:
        whole[frame.start() + 5 : frame.start() + 9] = struct.pack(">HH", height, width)
    elif whole.startswith(b"GIF"):
        whole[6:10] = struct.pack("<HH", width, height)
    elif whole.startswith(b"RIFF") and whole[12:16] == b"VP8X":
        whole[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif whole.startswith(b"RIFF"):
        whole[21:25] = struct.pack("<I", width - 1 | height - 1 << 14)
    elif b"ispe" in whole:
        at = whole.index(b"ispe") + 8
        whole[at : at + 8] = struct.pack(">II", width, height)
    elif whole.startswith(b"BM"):
        whole[18:26] = struct.pack("<II", width, height)
    else:
        whole[16:24] = struct.pack(">II", width, height)
    return bytes(whole)


@table("name", KINDS)
@table("size", [(1, 1), (41, 29), (1000, 1000), (16_000, 100), (16_000, 16_000), (1, 16_383)])
def test_a_header_that_claims_another_size(name: str, size: tuple[int, int]) -> None:
    encoded = _sized(name, *size)
    assert encoded != KINDS[name]
    holds(encoded)


@table("name", attacks.CORPUS)
def test_attacks_cost_a_sentence_or_nothing(name: str) -> None:
    make, sound = attacks.CORPUS[name]
    assert holds(make(), ImageLimits()) == sound


@pytest.mark.parametrize("wrong", [b"", b"\0" * 32, b"GIF89a", b"<svg/>"], ids=str)
def test_bytes_before_an_image_make_it_invalid(wrong: bytes) -> None:
    for name in ("jpeg", "png", "webp", "avif", "bmp"):
        assert holds(wrong + KINDS[name]) == (not wrong)


@pytest.mark.parametrize("name", ["jpeg", "png", "webp", "gif", "bmp", "bmp runs"])
def test_bytes_after_an_image_are_ignored(name: str) -> None:  # a polyglot
    behind = b"<script>alert(1)</script>PK\3\4" + images.encode(images.random_image(9, 9))
    np.testing.assert_array_equal(decode(KINDS[name] + behind, LIMITS), decode(KINDS[name], LIMITS))
