"""Reads an image's orientation from Exif, or else from XMP, as Pillow 12.3 does (Image.getexif, PngImagePlugin).

Sources: Exif 2.32 (TIFF 6.0 section 2); XMP part 2, tiff:Orientation; PNG third edition, section 11.3.3. XMP is
searched without an XML parser. At most MAX_TEXT_BYTES of it are searched, and no more of a PNG's text is inflated.
"""

import binascii
import re
import struct
import zlib

MAX_EXIF_ENTRIES = 1024
MAX_TEXT_BYTES = 64 << 10
ORIENTATION_TAG = 0x0112
UPRIGHT = 1

BYTE_ORDERS = {b"II*\0": "<", b"II\0*": "<", b"MM\0*": ">", b"MM*\0": ">"}
"""By the first bytes of Exif. Two of them are wrong, and are read like the right ones."""

SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
INTEGERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I"}
"""Bytes of a value by its kind in Exif, and the form of integers."""

EXIF_NAMES = re.compile(rb"\A(?:Exif\0\0)*")
IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
"""In an attribute or in an element; other prefixes of the name space than `tiff` are not looked for."""

XMP_KEYWORD, PROFILE_KEYWORD = b"XML:com.adobe.xmp", b"Raw profile type exif"
"""Keywords of a PNG's texts: XMP, and Exif in hexadecimal digits as ImageMagick writes it."""


def read_orientation(exif: bytes, xmp: bytes) -> int:
    """Return the orientation, 1 to 8, from an Exif block or else XMP; 1 if it is missing or damaged, as in viewers."""
    value = exif_orientation(exif)
    if value is None and (match := IN_XMP.search(xmp, 0, MAX_TEXT_BYTES)):
        value = int(match[1])
    return value if value is not None and 1 <= value <= 8 else UPRIGHT


def exif_orientation(exif: bytes) -> int | None:
    """Return the orientation that an Exif block states, which may be invalid; None if it states none."""
    tiff = EXIF_NAMES.sub(b"", exif, 1)
    if (order := BYTE_ORDERS.get(tiff[:4])) is None:
        return None
    value = None
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, directory)
        for entry in range(min(count, MAX_EXIF_ENTRIES)):
            start = directory + 2 + 12 * entry
            tag, kind, number, place = struct.unpack_from(f"{order}HHII", tiff, start)
            num_bytes = number * SIZES.get(kind, 0)
            start = place if num_bytes > 4 else start + 8
            if tag == ORIENTATION_TAG and 0 < num_bytes <= len(tiff) - start:
                # A value that is no integer is no orientation.
                value = struct.unpack_from(order + INTEGERS[kind], tiff, start)[0] if kind in INTEGERS else 0
    except struct.error:
        pass
    return value


def png_text(encoded: bytes, kind: bytes, start: int, end: int) -> bytes:
    """Return the inflated text of a PNG's tEXt, zTXt or iTXt chunk, whose content is in [*start*, *end*).

    At most MAX_TEXT_BYTES are read and returned. For a damaged chunk, nothing is returned.
    """
    content = encoded[start : min(end, start + MAX_TEXT_BYTES)]
    text = content.partition(b"\0")[2]
    if kind == b"tEXt":
        return text
    if kind == b"zTXt":
        return _inflated(text[1:]) if text.startswith(b"\0") else b""
    compressed, method = text[:1], text[1:2]
    parts = text[2:].split(b"\0", 2)  # a language, the keyword in that language, the text
    if len(parts) < 3 or (compressed != b"\0" and method != b"\0"):
        return b""
    return _inflated(parts[2]) if compressed != b"\0" else parts[2]


def raw_profile(text: bytes) -> bytes:
    """Return the Exif block in ImageMagick's text form: an empty line, a name, a length, and lines of digits.

    If a digit is wrong, nothing is returned.
    """
    digits = b"".join(b"".join(text.split(b"\n")[3:]).split())
    try:
        return binascii.unhexlify(digits[: len(digits) & ~1])
    except binascii.Error:
        return b""


def _inflated(content: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(content, MAX_TEXT_BYTES)
    except zlib.error:
        return b""
