"""Decoding, against the reference processors' own conversion."""

import io

import bitmaps
import images
import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps
from tables import table

from saccade.errors import ImageTooLarge, InvalidImage, SaccadeError
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header
from saccade.media.metadata import without_metadata

TURNED = Image.Exif()
TURNED[images.ORIENTATION] = 5
METADATA = {"exif": TURNED, "icc_profile": bytes(3000), "comment": b"a comment", "dpi": (72, 72), "xmp": b"<x/>" * 99}
NOISY = {
    f"{kind.lower()} {mode} with metadata": images.encode(images.random_image(70, 50, mode), kind, **METADATA)
    for kind, modes in {"JPEG": ("L", "RGB", "CMYK"), "PNG": ("L", "LA", "P", "RGBA"), "AVIF": ("RGB",)}.items()
    for mode in modes
}
AVIF = {
    **{f"avif {mode}": images.encode(images.random_image(75, 51, mode), "AVIF") for mode in ("L", "RGB", "RGBA")},
    **{f"avif orientation {orientation}": images.turned(orientation, "AVIF") for orientation in range(1, 9)},
    "avif 4:4:4": images.encode(images.random_image(57, 83), "AVIF", subsampling="4:4:4"),
    "avif animated": images.animation("AVIF"),
    "avif of odd sides": images.encode(images.random_image(31, 1), "AVIF"),
}
CORPUS = images.corpus() | AVIF | NOISY | bitmaps.corpus()
JPEG = images.encode(images.random_image(200, 150), "JPEG")
PNG = images.encode(images.random_image(200, 150), "PNG")
WEBP = images.encode(images.random_image(200, 150), "WEBP")
GIF = images.encode(images.random_image(200, 150, "P"), "GIF")


@table("name", CORPUS)
def test_pixels_equal_the_reference_conversion(name: str) -> None:
    from transformers.image_transforms import convert_to_rgb

    with Image.open(io.BytesIO(CORPUS[name])) as image:
        expected = convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True)
    decoded = decode(CORPUS[name], ImageLimits())
    assert decoded.dtype == np.uint8
    assert decoded.shape[1::-1] == read_header(CORPUS[name]).upright
    np.testing.assert_array_equal(decoded, expected)


@table("name", CORPUS)
def test_alpha_is_kept_for_families_that_ask(name: str) -> None:
    with Image.open(io.BytesIO(CORPUS[name])) as image:
        has_alpha = "A" in image.getbands() or "transparency" in image.info
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGBA"))
    decoded = decode(CORPUS[name], ImageLimits(), keeps_alpha=True)
    assert decoded.shape[2] == (4 if has_alpha else 3)
    np.testing.assert_array_equal(decoded, expected[..., : decoded.shape[2]])


def test_16_bit_grey_keeps_its_upper_byte() -> None:
    image = images.random_image(50, 40, "I;16")
    decoded = decode(images.encode(image), ImageLimits())
    np.testing.assert_array_equal(decoded, np.repeat((np.asarray(image) >> 8)[..., None], 3, -1))


def test_16_bit_transparency_is_white() -> None:
    image = images.random_image(50, 40, "I;16")
    transparent = image.getpixel((7, 7))
    decoded = decode(images.encode(image, transparency=transparent), ImageLimits())
    assert decoded[7, 7].tolist() == [255, 255, 255]


def _with(data: bytes, position: int, new: bytes) -> bytes:
    return data[:position] + new + data[position + len(new) :]


BROKEN = {
    **{f"jpeg cut at {share}": JPEG[: int(len(JPEG) * share)] for share in (0.1, 0.5, 0.9, 0.99)},
    **{f"png cut at {share}": PNG[: int(len(PNG) * share)] for share in (0.1, 0.5, 0.9)},
    **{f"webp cut at {share}": WEBP[: int(len(WEBP) * share)] for share in (0.1, 0.5, 0.9)},
    **{f"gif cut at {share}": GIF[: int(len(GIF) * share)] for share in (0.1, 0.5, 0.9)},
    "png with a broken checksum in its header": _with(PNG, 29, b"\0\0\0\0"),
    "png with a broken chunk": _with(PNG, PNG.index(b"IDAT"), b"\0\0\0\0"),
    "png whose pixels are no zlib stream": _with(PNG, PNG.index(b"IDAT") + 4, b"\0" * 64),
    "png by its first bytes only": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "jpeg without tables": JPEG[:2]
    + b"\xff\xc0\0\x0b\x08\0\x10\0\x10\x01\x01\x11\0\xff\xda\0\x08\x01\x01\0\0\x3f\0"
    + bytes(9),
}


@table("name", BROKEN)
def test_a_damaged_image_is_invalid(name: str) -> None:
    with pytest.raises(InvalidImage, match=r"^The (JPEG|PNG|WebP|GIF|image)[^0-9]*\.$"):
        decode(BROKEN[name], ImageLimits())


@pytest.mark.parametrize(
    "encoded",
    [images.png(20_000, 20_000), images.png(9_000, 9_000), images.png(1, 65_500), images.png(32_769, 200)],
)
def test_a_large_image_is_refused_from_its_header(encoded: bytes) -> None:
    with pytest.raises(ImageTooLarge):
        decode(encoded, ImageLimits())


def test_limits_above_the_decoders_own_do_not_crash() -> None:
    limits = ImageLimits(max_pixels=1 << 40, max_side=1 << 20)
    with pytest.raises(ImageTooLarge):
        decode(images.png(20_000, 20_000), limits)
    with pytest.raises(InvalidImage):  # 100 MP: Pillow warns, and the data is missing
        decode(images.png(10_000, 10_000), limits)


@table("name", NOISY)
def test_a_decoder_sees_no_metadata(name: str) -> None:
    stripped = without_metadata(NOISY[name], read_header(NOISY[name]).format)
    with Image.open(io.BytesIO(NOISY[name])) as noisy, Image.open(io.BytesIO(stripped)) as image:
        assert noisy.info.keys() & METADATA.keys() >= {"exif", "icc_profile"}
        # AVIF's profile may say how colours are coded; its orientation, a box of its own, Pillow shows as Exif.
        kept = {"exif", "icc_profile"} if image.format == "AVIF" else {"dpi"}
        assert image.info.keys() & METADATA.keys() <= kept


def test_bytes_after_a_jpeg_do_not_count_as_scans() -> None:
    """A phone's moving image has a film behind it, in which any two bytes occur."""
    encoded = images.encode(images.random_image(64, 48), "JPEG", progressive=True)
    np.testing.assert_array_equal(
        decode(encoded + b"\xff\xda\0\0" * 1000, ImageLimits()), decode(encoded, ImageLimits())
    )


def test_pillow_settings_are_unchanged() -> None:
    decode(JPEG, ImageLimits())
    assert Image.MAX_IMAGE_PIXELS == 1024 * 1024 * 1024 // 4 // 3
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_only_the_first_of_many_frames_is_decoded() -> None:
    many = decode(images.long_gif(10_000), ImageLimits())
    np.testing.assert_array_equal(many, decode(images.long_gif(1), ImageLimits()))


@pytest.mark.parametrize("name", ["png RGB", "jpeg progressive", "webp lossless alpha", "gif animated", "apng"])
def test_flipped_bytes_give_pixels_or_a_sentence(name: str) -> None:
    generator = np.random.default_rng(1)
    for _ in range(60):
        encoded = bytearray(CORPUS[name])
        for position in generator.integers(0, len(encoded), 4):
            encoded[position] ^= 1 << generator.integers(0, 8)
        try:
            decoded = decode(bytes(encoded), ImageLimits())
        except SaccadeError as error:
            assert "0x" not in error.message  # noqa: PT017
        else:
            assert decoded.shape[1::-1] == read_header(bytes(encoded)).upright
