"""Removes metadata, which does not determine the pixels, from encoded JPEG, PNG and AVIF.

Image libraries parse some metadata (Exif, colour profiles, comments, frames after the first) in time that grows with
the square of its length. Decoders therefore get images without metadata, and this module bounds the rest. The pixels
are the same, bit for bit.
"""

from saccade.errors import InvalidImage
from saccade.media import avif
from saccade.media.header import png_chunks
from saccade.media.jpeg_header import JPEG_COLOURS, JPEG_END, JPEG_FRAMES, JPEG_MARKER, JPEG_SCAN, jpeg_segments

MAX_JPEG_TABLE_BYTES = 256 << 10
"""Bound of tables and frame headers; ordinary images have 1 KB."""

MAX_JPEG_SCANS = 100
"""Encoders write 10 at most; each scan costs a pass over the whole image."""

MAX_PNG_CHUNKS = 16_384
"""Twice the number for 50 megapixels that do not compress, in chunks of 8 KB."""

JPEG_METADATA = frozenset({*range(0xE0, 0xF0), 0xFE})
JPEG_SEQUENTIAL = frozenset({0xC0, 0xC1, 0xC9})
JPEG_SCAN_START = b"\xff\xda"
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


def without_metadata(encoded: bytes, kind: str) -> bytes:
    """Return *encoded*, an image in the format *kind*, with only the data that determines its pixels.

    WebP, GIF and BMP are returned unchanged: they are parsed in linear time, and read_header() bounds the blocks before
    a GIF's frame. Raises InvalidImage for too many scans or chunks or too long a header, and the errors of the
    functions that read headers.
    """
    if kind == "JPEG":
        return _jpeg(encoded)
    if kind == "PNG":
        return _png(encoded)
    if kind == "AVIF":
        return avif.without_metadata(encoded)
    return encoded


def _jpeg(encoded: bytes) -> bytes:
    """Return the segments that define the pixels, without bytes in between, and everything from the first scan on."""
    pieces, num_bytes, scan, single = [encoded[:2]], 2, 0, False
    for marker, start, end in jpeg_segments(encoded):
        scan = start
        if start == end:
            break
        if marker not in JPEG_METADATA or encoded.startswith(JPEG_COLOURS.get(marker, ()), start):
            pieces.append(encoded[start - 4 : end])
            num_bytes += end - start + 4
            if num_bytes > MAX_JPEG_TABLE_BYTES:
                raise InvalidImage("The JPEG's header is too long.")
        if marker in JPEG_FRAMES:
            # A sequential image whose first scan holds all components ends after that scan.
            single = marker in JPEG_SEQUENTIAL
            num_components = encoded[start + 5]
    if not (single and encoded[scan + 2] == num_components) and _has_many_scans(encoded, scan):
        raise InvalidImage("The JPEG has too many scans.")
    return encoded if num_bytes == scan - 2 else b"".join([*pieces, encoded[scan - 2 :]])


def _has_many_scans(encoded: bytes, position: int) -> bool:
    if encoded.count(JPEG_SCAN_START, position) < MAX_JPEG_SCANS:
        return False
    # Bytes within a segment or after the end of the image may look like scans.
    number = 1
    while number <= MAX_JPEG_SCANS and (match := JPEG_MARKER.search(encoded, position)):
        marker = encoded[match.start() + 1]
        if marker == JPEG_END:
            return False
        number += marker == JPEG_SCAN
        position = match.end() + int.from_bytes(encoded[match.end() : match.end() + 2], "big")
    return number > MAX_JPEG_SCANS


def _png(encoded: bytes) -> bytes:
    """Drop ancillary chunks (lower-case first letter, PNG section 5.4) except tRNS, and all chunks after the pixels."""
    pieces, position, in_pixels = list[bytes](), 0, False
    for number, (kind, start, end) in enumerate(png_chunks(encoded)):
        if number == MAX_PNG_CHUNKS:
            raise InvalidImage("The PNG has too many chunks.")
        if in_pixels and kind != b"IDAT":
            return b"".join([*pieces, encoded[position:start], PNG_END])
        in_pixels = kind == b"IDAT"
        if kind[0] & 0x20 and kind != b"tRNS":
            pieces.append(encoded[position:start])
            position = end
    return b"".join([*pieces, encoded[position:]]) if pieces else encoded
