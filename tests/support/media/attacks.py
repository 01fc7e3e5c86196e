"""Images made to cost a decoder time or memory: small to send, sound or nearly so, all drawn here."""

import re
import struct
import zlib
from collections.abc import Callable
from functools import partial

import bitmaps
import images

EXIF = b"Exif\0\0II*\0" + struct.pack("<IHHHIHxxI", 8, 1, images.ORIENTATION, 3, 1, 6, 0)
"""An Exif block that says: turned by a quarter."""


def jpeg_with(segments: bytes, base: bytes | None = None) -> bytes:
    """Return a JPEG whose header begins with *segments*."""
    base = base or images.encode(images.random_image(64, 48), "JPEG")
    return base[:2] + segments + base[2:]


def segment(marker: int, content: bytes) -> bytes:
    """Return one JPEG segment."""
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


METADATA = {
    "exif": (0xE1, b"Exif\0\0"),
    "xmp": (0xE1, b"http://ns.adobe.com/xap/1.0/\0"),
    "icc": (0xE2, b"ICC_PROFILE\0\x01\xff"),
    "mpf": (0xE2, b"MPF\0"),
    "photoshop": (0xED, b"Photoshop 3.0\0" + b"8BIM\0\1\0\0\0\0\0\0" * 5000),
    "comment": (0xFE, b""),
}
"""Marker and beginning of the segments that image libraries look into."""


def jpeg_metadata(name: str, number: int, nbytes: int = 65_000) -> bytes:
    """Return a JPEG with *number* segments of one kind of METADATA."""
    marker, start = METADATA[name]
    return jpeg_with(segment(marker, (start + bytes(nbytes))[:nbytes]) * number)


def jpeg_exif_directory(number: int = 340) -> bytes:
    """Return a JPEG whose Exif directory reads the same megabytes again and again."""
    size = number * 65_000
    entries = b"".join(struct.pack("<HHII", 700, 7, size - 1_000_000, 16) for _ in range(65_000))
    exif = b"II*\0" + struct.pack("<IH", 8, 65_000) + entries
    exif += bytes(size - len(exif))
    return jpeg_with(b"".join(segment(0xE1, b"Exif\0\0" + exif[i : i + 65_000]) for i in range(0, size, 65_000)))


def jpeg_tables(number: int) -> bytes:
    """Return a JPEG with *number* segments full of quantisation tables."""
    return jpeg_with(segment(0xDB, (b"\0" + b"\x10" * 64) * 1008) * number)


def jpeg_scans(width: int, height: int, number: int) -> bytes:
    """Return a progressive grey JPEG with *number* empty scans after the first."""
    head = b"\xff\xd8" + segment(0xDB, b"\0" + b"\x01" * 64)
    head += segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\0")
    # One code of one bit: category 0 for DC; for AC the longest run of ended blocks (EOB14, 14 more bits).
    head += segment(0xC4, b"\0\x01" + bytes(15) + b"\0") + segment(0xC4, b"\x10\x01" + bytes(15) + b"\xe0")
    blocks = ((width + 7) // 8) * ((height + 7) // 8)
    first = segment(0xDA, b"\x01\x01\0\0\0\0") + bytes(blocks // 8 + 1)
    run = (1 << 15) - 1
    bits = ("0" + "1" * 14) * (blocks // run + 1)
    data = int(bits.ljust((len(bits) + 7) // 8 * 8, "0"), 2).to_bytes((len(bits) + 7) // 8, "big")
    scan = segment(0xDA, b"\x01\x01\0\x01\x3f\0") + data.replace(b"\xff", b"\xff\0")
    return head + first + scan * number + b"\xff\xd9"


def png_chunks(kind: bytes, number: int, content: bytes = b"") -> bytes:
    """Return a PNG with *number* chunks of *kind* before its pixels."""
    whole = images.png(64, 48, bytes(48 * (1 + 3 * 64)))
    one = struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return whole[:33] + one * number + whole[33:]


def gif_extensions(kind: int, number: int, blocks: int, nbytes: int = 255) -> bytes:
    """Return a GIF with *number* extensions of *kind* before its frame, each of *blocks* blocks of *nbytes*."""
    one = images.encode(images.random_image(64, 48, "P"), "GIF")
    start = 13 + (3 << (one[10] & 7) + 1)
    extension = b"!" + bytes([kind]) + (bytes([nbytes]) + b"x" * nbytes) * blocks + b"\0"
    return one[:start] + extension * number + one[start:]


def webp_chunks(kind: bytes, number: int, content: bytes = b"") -> bytes:
    """Return a WebP with *number* chunks of *kind* after its pixels."""
    whole = images.encode(images.random_image(64, 48, "RGBA"), "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0")
    chunk = kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)
    body = whole[8:] + chunk * number
    return b"RIFF" + struct.pack("<I", len(body)) + body


def webp_frames(number: int, size: int = 16) -> bytes:
    """Return an animated WebP of *number* equal frames."""
    whole = images.animation("WEBP", 2, (size, size))
    start = whole.index(b"ANMF")
    length = 8 + struct.unpack_from("<I", whole, start + 4)[0]
    body = whole[8:start] + whole[start : start + length] * number
    return b"RIFF" + struct.pack("<I", len(body)) + body


def apng_frames(number: int) -> bytes:
    """Return an APNG of *number* equal frames."""
    whole = images.animation("PNG", 2, (16, 16))
    start = whole.rindex(b"fcTL") - 4
    return whole[:start] + whole[start:-12] * number + whole[-12:]


def avif_associations(number: int) -> bytes:
    """Return an AVIF that gives properties to *number* items that it does not have, before its own."""
    whole = images.encode(images.random_image(16, 16), "AVIF")
    start = whole.index(b"ipma") + 8
    (old,) = struct.unpack_from(">I", whole, start)
    grown = whole[: start + 4] + b"\xff\xff\0" * number + whole[start + 4 :]
    for kind in (b"ipma", b"iprp", b"meta"):
        at = grown.index(kind) - 4
        (length,) = struct.unpack_from(">I", grown, at)
        grown = grown[:at] + struct.pack(">I", length + 3 * number) + grown[at + 4 :]
    return grown[:start] + struct.pack(">I", old + number) + grown[start + 4 :]


def avif_cropped() -> bytes:
    """Return an AVIF whose first property, a description of no use for pixels, is renamed to a crop."""
    whole = images.encode(images.random_image(16, 16), "AVIF")
    return re.sub(rb"pixi|colr", b"clap", whole, count=1)


def claiming(kind: str, width: int, height: int) -> bytes:
    """Return a WebP or GIF of a few bytes whose header claims *width* x *height*."""
    whole = bytearray(images.encode(images.random_image(16, 16, "P" if kind == "GIF" else "RGB"), kind, lossless=True))
    if kind == "GIF":
        whole[6:10] = struct.pack("<HH", width, height)
    else:
        whole[21:25] = struct.pack("<I", width - 1 | height - 1 << 14)
    return bytes(whole)


CORPUS: dict[str, tuple[Callable[[], bytes], bool]] = {
    **{f"jpeg {name}": (partial(jpeg_metadata, name, 300), True) for name in METADATA},
    "jpeg exif directory": (jpeg_exif_directory, True),
    "jpeg tables": (lambda: jpeg_tables(100), False),
    "jpeg 1000 scans": (lambda: jpeg_scans(2000, 1500, 1000), False),
    "jpeg 50 scans": (lambda: jpeg_scans(100, 100, 50), True),
    "jpeg tiny segments": (lambda: jpeg_with(segment(0xFE, b"") * 100_000), False),
    "png 200 000 chunks": (lambda: png_chunks(b"zzZz", 200_000), False),
    "png split": (lambda: png_chunks(b"IDAT", 200_000), False),
    "png profiles": (lambda: png_chunks(b"iCCP", 10_000, b"a\0\0" + zlib.compress(bytes(1 << 20))), True),
    "png text bomb": (lambda: png_chunks(b"zTXt", 20, b"a\0\0" + zlib.compress(bytes(32 << 20))), True),
    "png 9000 x 9000": (lambda: images.bomb(9_000, 9_000), False),
    "png 13300 x 13300": (lambda: images.png(13_300, 13_300), False),
    "png 1 x 65500": (lambda: images.bomb(1, 65_500), False),
    "png 65500 x 1": (lambda: images.bomb(65_500, 1), False),
    "png without pixels": (lambda: images.png(50, 40), False),
    "apng of 10 000 frames": (lambda: apng_frames(10_000), True),
    "gif of 10 000 frames": (lambda: images.long_gif(10_000), True),
    "gif 1000 comments": (lambda: gif_extensions(0xFE, 1000, 60), False),
    "gif small blocks": (lambda: gif_extensions(0xFF, 2000, 2000, 1), False),
    "gif one comment": (lambda: gif_extensions(0xFE, 1, 4000), True),
    "gif 16000 x 16000": (lambda: claiming("GIF", 16_000, 16_000), False),
    "gif 5000 x 5000 of one tile": (lambda: claiming("GIF", 5_000, 5_000), True),
    "webp 16000 x 16000": (lambda: claiming("WEBP", 16_000, 16_000), False),
    "webp 5000 x 5000 cut short": (lambda: claiming("WEBP", 5_000, 5_000), False),
    "webp 1 000 000 chunks": (lambda: webp_chunks(b"zzzz", 1_000_000), True),
    "webp of 10 000 frames": (lambda: webp_frames(10_000), True),
    "avif associations": (lambda: avif_associations(100_000), False),
    "avif cropped": (avif_cropped, False),
    "bmp short rows": (lambda: bitmaps.bmp(8, b"\1\7\0\0" * 1500, size=(32_768, 1_500), coding=1), True),
    "bmp long moves": (lambda: bitmaps.bmp(8, b"\0\2\xff\0" * 2_000_000 + b"\0\1", coding=1), True),
    "bmp empty rows": (lambda: bitmaps.bmp(8, b"\0\0" * 30_000, size=(1_000, 30_000), coding=1), True),
    "bmp without runs": (lambda: bitmaps.bmp(8, b"", size=(7_000, 7_000), coding=1), False),
    "bmp without pixels": (lambda: bitmaps.bmp(24, b"", size=(7_000, 7_000)), False),
    "bmp 16000 x 16000": (lambda: bitmaps.bmp(8, b"\0\1", size=(16_000, 16_000), coding=1), False),
    "bmp top down beyond 31 bits": (lambda: bitmaps.bmp(24, b"", size=(5, -(1 << 31))), False),
    "bmp 4 billion colours": (lambda: bitmaps.bmp(8, b"", colours=0xFFFFFFFF, palette=b""), False),
    "svg": (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", False),
    "heic": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100), False),
    "no bytes": (bytes, False),
    "zeros": (lambda: bytes(1 << 20), False),
}
"""By name: what makes the bytes, and whether they are a sound image all the same."""
