"""Dimensions and orientation of an AVIF image, from its boxes alone.

Sources: ISO/IEC 14496-12 (boxes, pitm, iinf), ISO/IEC 23008-12 (ispe, irot, imir, clap, ipma), AV1 Image File Format.
Of an animation (brand avis) the primary item is used, as in a still image; a file without one is damaged.
"""

import struct
from collections.abc import Iterator

from saccade.errors import InvalidImage, UnsupportedImageFormat

BRANDS = (b"avif", b"avis", b"mif1")
MAX_BOXES = 256
MAX_PROPERTIES = 1024
MAX_ASSOCIATIONS = 4096
ORIENTATIONS = {
    # Counter-clockwise quarter turns and the mirror's axis (None; 0: top to bottom; 1: left to right) to Exif's number.
    (0, None): 1, (1, None): 8, (2, None): 3, (3, None): 6,
    (0, 0): 4, (1, 0): 5, (2, 0): 2, (3, 0): 7,
    (0, 1): 2, (1, 1): 7, (2, 1): 4, (3, 1): 5,
}  # fmt: skip

Box = tuple[bytes, int, int]
"""Kind, start of the content and end of the box."""


def is_avif(encoded: bytes) -> bool:
    """Return whether the first box names an AVIF brand; with the brand mif1, avif must be a compatible brand."""
    if encoded[4:8] != b"ftyp" or encoded[8:12] not in BRANDS:
        return False
    length = min(int.from_bytes(encoded[:4], "big"), 1024)
    return encoded[8:12] != b"mif1" or b"avif" in (encoded[at : at + 4] for at in range(16, length, 4))


def read(encoded: bytes) -> tuple[int, int, int]:
    """Return stored width and height, and the orientation as Exif numbers it.

    Raises InvalidImage, UnsupportedImageFormat if the image has a crop box, and struct.error if the bytes end early.
    """
    _, start, end = _only(encoded, b"meta", 0, len(encoded))
    inside = start + 4, end
    _, primary, _ = _only(encoded, b"pitm", *inside)
    item = struct.unpack_from(">H" if encoded[primary] == 0 else ">I", encoded, primary + 4)[0]
    _, *properties = _only(encoded, b"iprp", *inside)
    _, first, last = _only(encoded, b"ipco", *properties)
    known = list(_boxes(encoded, first, last, MAX_PROPERTIES))
    size, turns, axis = None, 0, None
    for index in _associated(encoded, item, *properties):
        kind, start, _ = known[index - 1] if 0 < index <= len(known) else (b"", 0, 0)
        if kind == b"ispe":
            size = struct.unpack_from(">II", encoded, start + 4)
        elif kind == b"irot":
            turns = encoded[start] & 3
        elif kind == b"imir":
            axis = encoded[start] & 1
        elif kind == b"clap":
            raise UnsupportedImageFormat(
                "The AVIF has a crop box (clap), which is not supported; crop the image before you send it."
            )
    if size is None:
        raise _damaged()
    return *size, ORIENTATIONS[turns, axis]


def without_metadata(encoded: bytes) -> bytes:
    """Return the image as a still one, with its Exif and XMP items marked as unknown; pixels do not change."""
    _, start, end = _only(encoded, b"meta", 0, len(encoded))
    changed = bytearray(encoded)
    changed[8:12] = b"avif"
    for kind, first, last in _boxes(encoded, start + 4, end):
        if kind == b"iinf":
            # Decoders find items by their kind and skip unknown kinds.
            changed[first:last] = encoded[first:last].replace(b"Exif", b"skip").replace(b"mime", b"skip")
    return bytes(changed)


def _boxes(encoded: bytes, start: int, end: int, limit: int = MAX_BOXES) -> Iterator[Box]:
    for _ in range(limit):
        if start + 8 > end:
            return
        length, kind = struct.unpack_from(">I4s", encoded, start)
        content = start + 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", encoded, content)
            content += 8
        elif length == 0:
            length = end - start
        if length < content - start or start + length > end:
            raise _damaged()
        yield kind, content, start + length
        start += length
    raise _too_long()


def _only(encoded: bytes, kind: bytes, start: int, end: int) -> Box:
    """Return the first box of *kind*."""
    for box in _boxes(encoded, start, end):
        if box[0] == kind:
            return box
    raise _damaged()


def _associated(encoded: bytes, item: int, start: int, end: int) -> tuple[int, ...]:
    """Return the indices, from 1, of the properties of *item*, without the bit that marks essential ones."""
    steps = 0
    for kind, position, _ in _boxes(encoded, start, end):
        if kind != b"ipma":
            continue
        head = struct.Struct(">IB" if encoded[position] else ">HB")
        index, mask = ("H", 0x7FFF) if encoded[position + 3] & 1 else ("B", 0x7F)
        (number,) = struct.unpack_from(">I", encoded, position + 4)
        position += 8
        for _ in range(number):
            steps += 1
            if steps > MAX_ASSOCIATIONS:
                raise _too_long()
            owner, count = head.unpack_from(encoded, position)
            indices = struct.Struct(f">{count}{index}")
            position += head.size
            if owner == item:
                return tuple(value & mask for value in indices.unpack_from(encoded, position))
            position += indices.size
    raise _damaged()


def _too_long() -> InvalidImage:
    return InvalidImage("The AVIF has too many boxes, properties or associations.")


def _damaged() -> InvalidImage:
    return InvalidImage("The AVIF is damaged: its boxes are inconsistent.")
