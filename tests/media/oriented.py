"""Images that say in any place how to turn them; all written here, from Pillow's pixels and bytes by hand."""

import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import cache

import attacks
import images
from PIL import Image

JPEG_XMP = b"http://ns.adobe.com/xap/1.0/\0"
EXTENDED_XMP = b"http://ns.adobe.com/xmp/extension/\0" + b"0" * 32 + bytes(8)
XMP, PROFILE = "XML:com.adobe.xmp", "Raw profile type "
SIZE = (6, 4)
UNIT = 0x0128


def exif(value: int, order: str = "<", kind: int = 3, number: int = 1, tag: int = images.ORIENTATION) -> bytes:
    """Return an Exif block, without its name, of one entry: *number* values of a *kind* that Exif numbers."""
    form = {1: "B", 2: "B", 3: "H", 4: "I", 6: "b", 7: "B", 8: "h", 9: "i", 13: "I"}[kind]
    values = struct.pack(f"{order}{number}{form}", *[value] * number)
    place = values.ljust(4, b"\0") if len(values) <= 4 else struct.pack(order + "I", 26)
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    head = struct.pack(order + "IHHHI", 8, 1, tag, kind, number)
    return mark + head + place + bytes(4) + (values if len(values) > 4 else b"")


def xmp(text: str) -> bytes:
    """Return an XMP packet with *text*, a part of a description."""
    about = f'<rdf:Description rdf:about="" xmlns:tiff="http://ns.adobe.com/tiff/1.0/" {text}</rdf:Description>'
    return f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF>{about}</rdf:RDF></x:xmpmeta>'.encode()


def in_attribute(value: object) -> bytes:
    """Return XMP with the orientation as an attribute."""
    return xmp(f'tiff:Orientation="{value}">')


def in_element(value: object) -> bytes:
    """Return XMP with the orientation as an element."""
    return xmp(f"><tiff:Orientation>{value}</tiff:Orientation>")


@cache
def plain(kind: str) -> bytes:
    """Return an image of SIZE that says nothing of how to turn it."""
    options = {"WEBP": {"lossless": True}, "AVIF": {"quality": 100, "speed": 10}}.get(kind, {})
    return images.encode(images.random_image(*SIZE, "P" if kind == "GIF" else "RGB"), kind, **options)


def jpeg(*segments: bytes) -> bytes:
    """Return a JPEG with *segments* of the kind APP1, by their contents."""
    return attacks.jpeg_with(b"".join(attacks.segment(0xE1, content) for content in segments), plain("JPEG"))


def png(before: Iterable[tuple[bytes, bytes]] = (), after: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return a PNG with chunks before and after its pixels, by kind and content."""
    whole = plain("PNG")
    end = len(whole) - 12
    return whole[:33] + b"".join(map(_chunk, before)) + whole[33:end] + b"".join(map(_chunk, after)) + whole[end:]


def _chunk(chunk: tuple[bytes, bytes]) -> bytes:
    kind, content = chunk
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def text(kind: str, keyword: str, content: bytes) -> tuple[bytes, bytes]:
    """Return a chunk of text: tEXt, zTXt, iTXt, or `packed` for an iTXt that is compressed."""
    start, packed = keyword.encode() + b"\0", zlib.compress(content)
    return {
        "tEXt": (b"tEXt", start + content),
        "zTXt": (b"zTXt", start + b"\0" + packed),
        "iTXt": (b"iTXt", start + b"\0\0en\0word\0" + content),
        "packed": (b"iTXt", start + b"\1\0\0\0" + packed),
    }[kind]


def profile(name: str, content: bytes) -> bytes:
    """Return *content* as ImageMagick writes it into a text: name, length, lines of 72 digits."""
    digits = content.hex()
    lines = [digits[start : start + 72] for start in range(0, len(digits), 72)]
    return "\n".join(["", name, f"{len(content):8}", *lines, ""]).encode()


def webp(chunks: Sequence[tuple[bytes, bytes]], flags: int = 0x0C) -> bytes:
    """Return an extended WebP with *chunks* after its pixels; *flags* say that it has Exif (8) and XMP (4)."""
    width, height = (side - 1 for side in SIZE)
    size = width.to_bytes(3, "little") + height.to_bytes(3, "little")
    body = _piece(b"VP8X", bytes([flags, 0, 0, 0]) + size) + plain("WEBP")[12:]
    body += b"".join(_piece(*chunk) for chunk in chunks)
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def _piece(kind: bytes, content: bytes) -> bytes:
    return kind + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


@cache
def avif(turned: int = 1, exif_value: int | None = None, packet: bytes = b"") -> bytes:
    """Return an AVIF that its boxes turn as Exif numbers it, with an orientation in Exif and with XMP."""
    block = Image.Exif()
    if exif_value is not None:
        block[UNIT] = exif_value
    if turned != 1:
        block[images.ORIENTATION] = turned
    # The encoder takes the orientation out of Exif, so another tag of its kind stands there meanwhile.
    whole = images.encode(images.random_image(*SIZE), "AVIF", exif=block if block else b"", xmp=packet, speed=10)
    return whole.replace(UNIT.to_bytes(2, "little") + b"\3\0", images.ORIENTATION.to_bytes(2, "little") + b"\3\0")
