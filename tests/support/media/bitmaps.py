"""BMPs of every kind, written by hand, since Pillow writes few."""

import struct
from functools import cache

import images
import numpy as np

PALETTE = bytes(np.random.default_rng(1).integers(0, 256, 1024, np.uint8))
WIDTH, HEIGHT = 37, 23


def bmp(
    bits: int,
    rows: bytes,
    *,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    coding: int = 0,
    header: int = 40,
    colours: int = 0,
    palette: bytes | None = None,
    masks: tuple[int, ...] = (),
    gap: int = 0,
) -> bytes:
    """Return a BMP of *rows*, whose *header* has so many bytes; *gap* bytes stand before the pixels.

    Of a header of 40 bytes, *masks* stand after it, else within it. By default the palette is a part of PALETTE.
    """
    if palette is None:
        palette = PALETTE[: (3 if header == 12 else 4) * (colours or 1 << bits)] if bits <= 8 else b""
    if header == 12:
        head = struct.pack("<IHHHH", header, *size, 1, bits)
    else:
        head = struct.pack("<IiiHHIIiiII", header, *size, 1, bits, coding, len(rows), 2835, 2835, colours, 0)
        head += struct.pack(f"<{len(masks)}I", *masks)
        head += bytes(max(0, header - len(head)))
    pixels = 14 + len(head) + len(palette) + gap
    return struct.pack("<2sIII", b"BM", pixels + len(rows), 0, pixels) + head + palette + bytes(gap) + rows


def rows(bits: int, width: int = WIDTH, height: int = HEIGHT, seed: int = 0) -> bytes:
    """Return the bytes of random pixels, each row in whole words."""
    stride = (width * bits + 31) // 32 * 4
    return images.draw(stride, abs(height), 1, seed).tobytes()


RUNS = (
    b"\5\7\0\3\1\2\3\0\xff\x09\0\0"  # a run, three pixels written out, a run beyond the end of the row
    b"\0\2\3\1\4\1\0\0"  # to the right and to the next row
    b"\x25\3\0\0\0\6\1\2\3\4\5\6\0\0\0\4\1\2\3\4\1\2" + bytes((WIDTH - 5, 5)) + b"\0\0"
)
"""In eight bits; rows after these are left out, so they need a last code."""


@cache
def corpus() -> dict[str, bytes]:
    """Return sound BMPs by name."""
    plain = {f"bmp of {bits} bits": bmp(bits, rows(bits)) for bits in (1, 4, 8, 16, 24, 32)}
    upper = {f"bmp of {bits} bits, top down": bmp(bits, rows(bits), size=(WIDTH, -HEIGHT)) for bits in (1, 8, 24)}
    os2 = {f"bmp of OS/2, {bits} bits": bmp(bits, rows(bits), header=12) for bits in (1, 4, 8, 24)}
    heads = {f"bmp with a header of {length}": bmp(24, rows(24), header=length) for length in (52, 56, 64, 108, 124)}
    return plain | upper | os2 | heads | _with_masks() | {
        "bmp of 3 colours": bmp(8, bytes(i % 3 for i in rows(8)), colours=3),
        "bmp of 5 colours with a gap": bmp(4, bytes(i & 0x33 for i in rows(4)), colours=5, gap=9),
        "bmp of grey": bmp(8, rows(8), palette=b"".join(bytes((i, i, i, 0)) for i in range(256))),
        "bmp of 1 x 1": bmp(24, b"\1\2\3\0", size=(1, 1)),
        "bmp without the last zeros": bmp(24, rows(24)[:-1]),
        "bmp in runs of 8 bits": bmp(8, _finished(RUNS), coding=1),
        "bmp in runs of 8 bits, top down": bmp(8, _finished(RUNS), size=(WIDTH, -HEIGHT), coding=1),
        "bmp in runs, 9 colours": bmp(8, _finished(RUNS.replace(b"\xff\x09", b"\xff\x08")), coding=1, colours=9),
        "bmp in runs of 4 bits": bmp(4, _finished(b"\5\x12\0\4\x34\x56\xff\x78\0\0\0\2\3\1\4\1\0\0"), coding=2),
    }  # fmt: skip


def _finished(runs: bytes) -> bytes:
    """Return *runs* with a full row for each that may be missing; what exceeds the image is not read."""
    return runs + (bytes((WIDTH, 2)) + b"\0\0") * HEIGHT + b"\0\1"


def _with_masks() -> dict[str, bytes]:
    of_16 = {"565": (0xF800, 0x7E0, 0x1F), "555": (0x7C00, 0x3E0, 0x1F)}
    of_32 = {
        "BGRX": (0xFF0000, 0xFF00, 0xFF, 0),
        "XBGR": (0xFF000000, 0xFF0000, 0xFF00, 0),
        "BGXR": (0xFF000000, 0xFF00, 0xFF, 0),
        "ABGR": (0xFF000000, 0xFF0000, 0xFF00, 0xFF),
        "RGBA": (0xFF, 0xFF00, 0xFF0000, 0xFF000000),
        "BGRA": (0xFF0000, 0xFF00, 0xFF, 0xFF000000),
        "BGAR": (0xFF000000, 0xFF00, 0xFF, 0xFF0000),
        "no": (0, 0, 0, 0),
    }
    return {
        **{f"bmp of {name} in 16 bits": bmp(16, rows(16), coding=3, masks=masks) for name, masks in of_16.items()},
        **{
            f"bmp of {name} in 32 bits, header {length}": bmp(32, rows(32), coding=3, header=length, masks=masks)
            for name, masks in of_32.items()
            for length in (56, 124)
        },
        "bmp of BGRX in 32 bits": bmp(32, rows(32), coding=3, masks=of_32["BGRX"][:3]),
        "bmp of BGR in 24 bits": bmp(24, rows(24), coding=3, masks=of_32["BGRX"][:3]),
    }
