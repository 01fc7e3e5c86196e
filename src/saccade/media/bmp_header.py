"""Reads a BMP's dimensions and coding from its headers, and knows which codings are decoded.

Sources: BITMAPFILEHEADER, BITMAPINFOHEADER, BITMAPV4HEADER and BITMAPV5HEADER (Windows GDI); Bitmap-File Formats of
OS/2 2.0. If these are ambiguous, Saccade follows Pillow 12.3 (BmpImagePlugin).
"""

import struct
from dataclasses import dataclass

from saccade.errors import InvalidImage, UnsupportedImageFormat

FILE_HEADER_BYTES = 14
CORE = 12
OS2 = 64
"""Lengths of headers: the shortest has other fields than the rest; in that of OS/2 2.0 numbers mean other codings."""

HEADERS = frozenset({CORE, 40, 52, 56, OS2, 108, 124})
PLAIN, RLE8, RLE4, FIELDS = 0, 1, 2, 3
CODINGS = {
    (PLAIN, 1), (PLAIN, 4), (PLAIN, 8), (PLAIN, 16), (PLAIN, 24), (PLAIN, 32),
    (RLE8, 8), (RLE4, 4),
    (FIELDS, 16), (FIELDS, 24), (FIELDS, 32),
}  # fmt: skip
"""Number of the coding, and bits of a pixel."""

CONTAINED = {4: "JPEG", 5: "PNG"}
MAX_COLOURS = 256
MASKS: dict[int, frozenset[tuple[int, ...]]] = {
    16: frozenset({(0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F)}),
    24: frozenset({(0xFF0000, 0xFF00, 0xFF)}),
    32: frozenset(
        {
            (0xFF0000, 0xFF00, 0xFF, 0),
            (0xFF000000, 0xFF0000, 0xFF00, 0),
            (0xFF000000, 0xFF00, 0xFF, 0),
            (0xFF000000, 0xFF0000, 0xFF00, 0xFF),
            (0xFF, 0xFF00, 0xFF0000, 0xFF000000),
            (0xFF0000, 0xFF00, 0xFF, 0xFF000000),
            (0xFF000000, 0xFF00, 0xFF, 0xFF0000),
            (0, 0, 0, 0),
        }
    ),
}
"""By bits of a pixel: which of them are red, green, blue and, of 32, transparency."""


@dataclass(frozen=True)
class BmpHeader:
    """The content of a BMP's headers.

    - width, height: in pixels; either may be 0, and a damaged width is negative.
    - is_top_down: whether the first row is the top one.
    - palette: the palette's offset in the file, in bytes.
    - colours, entry_bytes: the palette's number of entries, and the size of each in bytes.
    - pixels: the pixels' offset in the file, in bytes.
    """

    width: int
    height: int
    is_top_down: bool
    bits: int
    coding: int
    palette: int
    colours: int
    entry_bytes: int
    pixels: int


def read(encoded: bytes) -> BmpHeader:
    """Read a BMP's headers.

    Raises InvalidImage if they are damaged, or if pixels without run-length encoding are cut off. Raises
    UnsupportedImageFormat for codings that are not decoded, and struct.error if the bytes end early.
    """
    pixels, length = struct.unpack_from("<II", encoded, 10)
    if length not in HEADERS:
        raise InvalidImage("The image begins like a BMP, but its header is damaged.")
    if length == CORE:
        width, height, _, bits = struct.unpack_from("<HHHH", encoded, 18)
        coding = colours = 0
    else:
        width, height, _, bits, coding, colours = struct.unpack_from("<iiHHI12xI", encoded, 18)
    _check_coding(encoded, length, coding, bits)
    has_palette, palette, entry_bytes = bits <= 8, FILE_HEADER_BYTES + length, 3 if length == CORE else 4
    colours = (colours or 1 << bits) if has_palette else 0
    if colours > MAX_COLOURS:
        raise InvalidImage(f"The BMP's palette has {colours} colours; at most {MAX_COLOURS} are possible.")
    if pixels == 0 or (pixels == palette and has_palette):
        pixels = palette + colours * entry_bytes + (12 if coding == FIELDS and length == 40 else 0)
    header = BmpHeader(width, abs(height), height < 0, bits, coding, palette, colours, entry_bytes, pixels)
    if coding in (PLAIN, FIELDS) and min(header.width, header.height) > 0:
        _check_length(encoded, header)
    return header


def _check_coding(encoded: bytes, length: int, coding: int, bits: int) -> None:
    if coding in CONTAINED and length != OS2:
        kind = CONTAINED[coding]
        raise UnsupportedImageFormat(f"The BMP contains a {kind}, which is not supported; send the {kind} by itself.")
    if (coding, bits) not in CODINGS or (length == OS2 and coding > RLE4):
        kind = f"has {bits} bits a pixel in coding {coding}"
    elif coding == FIELDS and _masks(encoded, length, bits) not in MASKS[bits]:
        kind = "has unusual masks of colours"
    else:
        return
    raise UnsupportedImageFormat(f"The BMP {kind}, which is not supported; save it with 24 bits a pixel, or as PNG.")


def _masks(encoded: bytes, length: int, bits: int) -> tuple[int, ...]:
    """Return the masks for red, green and blue and, with 32 bits and a long header, for transparency."""
    masks = struct.unpack_from("<III", encoded, 54)
    if bits < 32:
        return masks
    return (*masks, *(struct.unpack_from("<I", encoded, 66) if length >= 56 else (0,)))


def _check_length(encoded: bytes, header: BmpHeader) -> None:
    """Raise InvalidImage if there are too few bytes for the pixels; padding after the last row may be missing."""
    row_bits = header.width * header.bits
    stride = (row_bits + 31 >> 5) * 4
    if header.pixels + stride * (header.height - 1) + (row_bits + 7 >> 3) > len(encoded):
        raise InvalidImage("The BMP is truncated: it has fewer bytes than its pixels take.")
