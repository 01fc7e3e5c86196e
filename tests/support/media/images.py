"""Encoded images of every kind that is served, and of many that are not; all drawn here, from seeds."""

import io
import struct
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ORIENTATION = 0x0112
SIZES = (
    (1, 1), (2, 3), (7, 5), (31, 33), (32, 32), (33, 31), (48, 80), (63, 65), (100, 75), (90, 230), (150, 100),
    (200, 1), (1, 200), (3, 600), (777, 5), (255, 256), (321, 123), (448, 448), (640, 481), (1025, 257),
)  # fmt: skip


def draw(width: int, height: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Return [height, width, channels] uint8: slopes with noise on them, so that every resampling error shows."""
    generator = np.random.default_rng((seed, width, height, channels))
    y, x = np.indices((height, width))
    slopes = np.stack([(x * (3 + c) + y * (5 - c)) % 256 for c in range(channels)], -1)
    return np.clip(slopes + generator.integers(-40, 41, slopes.shape), 0, 255).astype(np.uint8)


def random_image(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Return an image in one of Pillow's modes; those with transparency have every degree of it."""
    if mode == "I;16":
        high, low = np.moveaxis(draw(width, height, 2, seed).astype(np.uint16), -1, 0)
        return Image.fromarray(high << 8 | low)
    bands = {"L": 1, "LA": 2, "RGBA": 4, "CMYK": 4}.get(mode, 3)
    pixels = draw(width, height, bands, seed)
    drawn = Image.fromarray(pixels[..., 0] if bands == 1 else pixels, {1: "L", 2: "LA", 3: "RGB"}.get(bands, mode))
    if mode == "P":
        return drawn.quantize(64)
    return drawn.convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return *image* as a file of *kind*."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int, kind: str = "JPEG") -> bytes:
    """Return an image of 60 x 40 whose Exif block says *orientation*."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encode(random_image(60, 40, seed=orientation), kind, exif=exif)


def png(width: int, height: int, rows: bytes = b"", chunks: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return an RGB PNG by hand: *chunks* stand before the data, *rows* are its bytes before compression."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return PNG_SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in content
    )


@cache
def bomb(width: int, height: int) -> bytes:
    """Return a complete black PNG of *width* x *height*: a thousandth of its pixels' bytes."""
    compressor = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    data = b"".join(compressor.compress(row) for _ in range(height)) + compressor.flush()
    whole = png(width, height)
    start = whole.index(b"IDAT") - 4
    chunk = struct.pack(">I", len(data)) + b"IDAT" + data + struct.pack(">I", zlib.crc32(b"IDAT" + data))
    return whole[:start] + chunk + whole[-12:]


def animation(kind: str, frames: int = 3, size: tuple[int, int] = (50, 34)) -> bytes:
    """Return a file of *kind* (GIF, PNG, WEBP) whose *frames* differ."""
    images = [random_image(*size, seed=10 + index) for index in range(frames)]
    return encode(images[0], kind, save_all=True, append_images=images[1:])


def long_gif(frames: int) -> bytes:
    """Return a GIF of 16 x 16 with *frames* equal frames, written by hand since encoders drop repeated ones."""
    one = encode(random_image(16, 16, "P"), "GIF")
    start = one.index(b",", 13 + (3 << (one[10] & 7) + 1))
    return one[:start] + one[start:-1] * frames + b";"


def transparent_palette() -> bytes:
    """Return a PNG whose palette has a transparent colour (tRNS)."""
    return encode(random_image(70, 44, "P"), "PNG", transparency=3)


def transparent_colour() -> bytes:
    """Return an RGB PNG in which one colour counts as transparent (tRNS)."""
    image = random_image(45, 71)
    return encode(image, "PNG", transparency=image.getpixel((3, 3)))


def _modes() -> dict[str, bytes]:
    png_modes = {f"png {mode}": encode(random_image(75, 51, mode)) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")}
    return png_modes | {
        "png tRNS palette": transparent_palette(),
        "png tRNS colour": transparent_colour(),
        "png tRNS grey": encode(random_image(40, 50, "L"), "PNG", transparency=77),
        "png interlaced order": encode(random_image(130, 97, seed=5), "PNG", optimize=True),
        "jpeg L": encode(random_image(99, 61, "L"), "JPEG"),
        "jpeg CMYK": encode(random_image(64, 81, "CMYK"), "JPEG"),
        "jpeg progressive": encode(random_image(131, 77), "JPEG", progressive=True),
        "jpeg 4:4:4": encode(random_image(57, 83), "JPEG", subsampling=0, quality=95),
        "webp lossy": encode(random_image(85, 47), "WEBP"),
        "webp lossless": encode(random_image(46, 86), "WEBP", lossless=True),
        "webp lossless alpha": encode(random_image(66, 86, "RGBA"), "WEBP", lossless=True),
        "webp alpha": encode(random_image(86, 66, "RGBA"), "WEBP"),
        "gif": encode(random_image(54, 39, "P"), "GIF"),
        "gif transparent": encode(random_image(54, 39, "P"), "GIF", transparency=5),
        "gif animated": animation("GIF"),
        "apng": animation("PNG"),
        "webp animated": animation("WEBP"),
    }


@cache
def corpus() -> dict[str, bytes]:
    """Return more than 60 sound images by name."""
    kinds: list[tuple[str, dict[str, Any]]] = [("PNG", {}), ("JPEG", {"quality": 90}), ("WEBP", {"quality": 80})]
    sized = {
        f"{kind.lower()} {width}x{height}": encode(random_image(width, height, seed=index), kind, **options)
        for index, (width, height) in enumerate(SIZES)
        for kind, options in (kinds[index % 3],)
    }
    oriented = {
        f"{kind.lower()} orientation {orientation}": turned(orientation, kind)
        for orientation in range(1, 9)
        for kind in ("JPEG", "PNG", "WEBP")
    }
    return sized | oriented | _modes()
