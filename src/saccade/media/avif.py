"""Reads an AVIF image's dimensions, orientation, Exif and XMP from its boxes alone.

Sources: ISO/IEC 14496-12 (boxes, pitm, iinf, iloc, iref), ISO/IEC 23008-12 (ispe, irot, imir, clap, ipma), AV1 Image
File Format. An animation (brand avis) is read through its primary item, like a still image. Without one, the file
counts as damaged.
"""

import struct
from collections.abc import Iterator

from saccade.errors import InvalidImage, UnsupportedImageFormat

BRANDS = (b"avif", b"avis", b"mif1")
MAX_BOXES = 256
MAX_PROPERTIES = 1024
MAX_ASSOCIATIONS = 4096
MAX_METADATA_BYTES = 64 << 10
EXIF, XMP = (b"Exif", b""), (b"mime", b"application/rdf+xml")
"""Kind and content type of items."""
ORIENTATIONS = {
    # Counter-clockwise quarter turns and the mirror's axis (None; 0: top to bottom; 1: left to right) to Exif's number.
    (0, None): 1, (1, None): 8, (2, None): 3, (3, None): 6,
    (0, 0): 4, (1, 0): 5, (2, 0): 2, (3, 0): 7,
    (0, 1): 2, (1, 1): 7, (2, 1): 4, (3, 1): 5,
}  # fmt: skip

Box = tuple[bytes, int, int]
"""Kind, start of the content and end of the box."""


def is_avif(encoded: bytes) -> bool:
    """Return whether the first box names an AVIF brand; if that is mif1, avif must be a compatible brand."""
    if encoded[4:8] != b"ftyp" or encoded[8:12] not in BRANDS:
        return False
    length = min(int.from_bytes(encoded[:4], "big"), 1024)
    return encoded[8:12] != b"mif1" or b"avif" in (encoded[at : at + 4] for at in range(16, length, 4))


def read(encoded: bytes) -> tuple[int, int, int]:
    """Return the stored width and height, and the orientation as an Exif number.

    Raises InvalidImage, UnsupportedImageFormat if the image has a crop box, and struct.error or IndexError if the bytes
    end early.
    """
    _, start, end = _only(encoded, b"meta", 0, len(encoded))
    inside = start + 4, end
    item = _primary(encoded, *_only(encoded, b"pitm", *inside)[1:])
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


def metadata(encoded: bytes) -> tuple[bytes, bytes]:
    """Return the Exif block and the XMP that describe the primary item, each empty if it is missing or damaged.

    At most MAX_METADATA_BYTES of each are returned.
    """
    exif = xmp = b""
    try:
        _, start, end = _only(encoded, b"meta", 0, len(encoded))
        boxes = {kind: (first, last) for kind, first, last in _boxes(encoded, start + 4, end)}
        primary = _primary(encoded, *boxes[b"pitm"])
        describing = set(_describing(encoded, *boxes[b"iref"], primary))
        kinds = dict(_items(encoded, *boxes[b"iinf"]))
        for item, first, last in _places(encoded, boxes[b"iloc"][0], boxes.get(b"idat", (0, 0))[0]):
            kind = kinds.get(item) if item in describing else None
            if kind == EXIF:  # a number of four bytes comes first: how many more precede the Exif block
                exif = encoded[first + 4 : min(last, first + 4 + MAX_METADATA_BYTES)]
            elif kind == XMP:
                xmp = encoded[first : min(last, first + MAX_METADATA_BYTES)]
    except (struct.error, LookupError, InvalidImage):
        pass
    return exif, xmp


def without_metadata(encoded: bytes) -> bytes:
    """Return a still image with the same pixels, whose Exif and MIME items (such as XMP) have an unknown kind."""
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
    """Return the first box of *kind*. Raises InvalidImage if there is none."""
    for box in _boxes(encoded, start, end):
        if box[0] == kind:
            return box
    raise _damaged()


def _primary(encoded: bytes, start: int, _: int) -> int:
    return int(struct.unpack_from(">H" if encoded[start] == 0 else ">I", encoded, start + 4)[0])


def _items(encoded: bytes, start: int, end: int) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    """Yield each item's number, kind and content type from the box iinf. Only the kind mime has a content type."""
    for _, first, last in _boxes(encoded, start + (6 if encoded[start] == 0 else 8), end, MAX_PROPERTIES):
        number = ">H" if encoded[first] < 3 else ">I"
        (item,) = struct.unpack_from(number, encoded, first + 4)
        position = first + 4 + struct.calcsize(number) + 2  # a protection scheme comes before the kind
        kind, (_, content_type, *_) = (
            encoded[position : position + 4],
            (*encoded[position + 4 : min(last, position + MAX_BOXES)].split(b"\0", 2), b""),
        )
        yield item, (kind, content_type if kind == b"mime" else b"")


def _describing(encoded: bytes, start: int, end: int, primary: int) -> Iterator[int]:
    """Yield the number of each item that describes *primary* according to the box iref."""
    number = "H" if encoded[start] == 0 else "I"
    head = struct.Struct(f">{number}H")
    for kind, first, _ in _boxes(encoded, start + 4, end, MAX_PROPERTIES):
        if kind == b"cdsc":
            item, count = head.unpack_from(encoded, first)
            if primary in struct.unpack_from(f">{min(count, MAX_BOXES)}{number}", encoded, first + head.size):
                yield item


def _places(encoded: bytes, start: int, data: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number, start and end of each item that the box iloc places in one piece.

    The content of iloc begins at *start*, that of idat at *data*.
    """
    version, sizes, more = encoded[start], encoded[start + 4], encoded[start + 5]
    long = 4 if version == 2 else 2
    of_item = (long, 2 if version else 0, 2, more >> 4, 2)
    of_piece = (more & 15 if version else 0, sizes >> 4, sizes & 15)
    (number,), position = _integers(encoded, start + 6, (long,))
    for _ in range(min(number, MAX_PROPERTIES)):
        (item, method, _, base, pieces), position = _integers(encoded, position, of_item)
        if pieces > 1:
            position += pieces * sum(of_piece)
            continue
        (_, offset, length), position = _integers(encoded, position, of_piece)
        begin = base + offset + (data if method & 15 == 1 else 0)
        yield item, begin, begin + length


def _integers(encoded: bytes, position: int, widths: tuple[int, ...]) -> tuple[list[int], int]:
    """Return big-endian integers of *widths* bytes from *position*, and the position after them."""
    values = []
    for width in widths:
        values.append(int.from_bytes(encoded[position : position + width], "big"))
        position += width
    return values, position


def _associated(encoded: bytes, item: int, start: int, end: int) -> tuple[int, ...]:
    """Return the indices, from 1, of *item*'s properties, without the bit that marks a property as essential."""
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
