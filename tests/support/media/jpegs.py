"""JPEGs by hand: bytes between segments, and kinds of coding that Pillow does not write."""

import struct
from collections.abc import Callable

import attacks
import numpy as np

SOI, SCAN = b"\xff\xd8", 0xDA
JFIF = attacks.segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0")
ADOBE_RGB, ADOBE_YCC = (attacks.segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([kind])) for kind in (0, 1))


def segments(encoded: bytes) -> tuple[list[bytes], bytes]:
    """Return the segments of a JPEG without stray bytes, from its first to the one before its scan, and the rest."""
    found, position = [], 2
    while encoded[position + 1] != SCAN:
        end = position + 2 + int.from_bytes(encoded[position + 2 : position + 4], "big")
        found.append(encoded[position:end])
        position = end
    return found, encoded[position:]


def with_stray_bytes(encoded: bytes, stray: Callable[[int, int], bytes]) -> bytes:
    """Return a JPEG with *stray* (position, marker before it) after each segment of its header."""
    found, rest = segments(encoded)
    return SOI + b"".join(one + stray(index, one[1]) for index, one in enumerate(found)) + rest


def between_scans(encoded: bytes, stray: bytes) -> bytes:
    """Return a progressive JPEG with *stray* before the segments that follow its first scan."""
    first = encoded.index(b"\xff\xda") + 2
    changed, position = encoded[:first], first
    while position < len(encoded):
        if encoded[position] == 0xFF and encoded[position + 1] in (0xC4, SCAN):
            end = position + 2 + int.from_bytes(encoded[position + 2 : position + 4], "big")
            changed += stray + encoded[position:end]
            position = end
        else:
            changed += encoded[position : position + 1]
            position += 1
    return changed


def of_frame(encoded: bytes, marker: int) -> bytes:
    """Return a JPEG that says that its frame is of another kind."""
    at = encoded.index(b"\xff\xc0")
    return encoded[: at + 1] + bytes([marker]) + encoded[at + 2 :]


def frame(marker: int, bits: int = 8, components: int = 3) -> bytes:
    """Return the segment of a frame of 20 x 10."""
    each = b"".join(bytes([number, 0x11, 0]) for number in range(components))
    return attacks.segment(marker, struct.pack(">BHHB", bits, 10, 20, components) + each)


def lossless(pixels: np.ndarray, bits: int = 8, head: bytes = b"") -> bytes:
    """Return *pixels* [height, width, components] as a lossless JPEG (T.81, annex H), predicted from the left.

    Each category of differences has a code of five bits.
    """
    height, width, components = pixels.shape
    ids = range(1, components + 1)
    size = struct.pack(">BHHB", bits, height, width, components) + b"".join(bytes([i, 0x11, 0]) for i in ids)
    table = bytes([0, 0, 0, 0, 0, bits + 1]) + bytes(11) + bytes(range(bits + 1))
    scan = bytes([components]) + b"".join(bytes([i, 0]) for i in ids) + b"\1\0\0"
    above = np.concatenate([np.full((1, components), 1 << bits - 1), pixels[:-1, 0]])
    before = np.concatenate([above[:, None], pixels[:, :-1]], 1)
    code = ""
    for difference in (pixels.astype(int) - before).ravel().tolist():
        category = abs(difference).bit_length()
        code += f"{category:05b}"
        code += f"{difference + (difference < 0) * ((1 << category) - 1):0{category}b}" if category else ""
    code += "1" * (-len(code) % 8)
    data = int(code, 2).to_bytes(len(code) // 8, "big").replace(b"\xff", b"\xff\0")
    header = attacks.segment(0xC3, size) + attacks.segment(0xC4, table) + attacks.segment(SCAN, scan)
    return SOI + head + header + data + b"\xff\xd9"
