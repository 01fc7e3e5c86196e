"""Makes a font that shows every letter as a square, so that PDFium reports all letters on a page.

PDFium's list of a page's letters leaves out text without extent, such as a single letter that its font lacks. Source
for the tables: OpenType 1.9.1.
"""

import struct
from functools import cache

from saccade.media.pdf_fonts import SAMPLES, Font, read_font

EM = 1000
FIRST_LETTER, LAST_LETTER = 0x20, 0xFFFE
SEGMENT = 4096
SQUARE = struct.pack(">hhhhhHH4B8h", 1, 0, 0, EM, EM, 3, 0, 1, 1, 1, 1, 0, EM, 0, -EM, 0, 0, EM, 0)
"""A contour of four points on the curve: their marks, and the differences of x and of y."""


@cache
def survey_font() -> Font:
    """Return the font for text in every character set."""
    return read_font("the survey", _file(), frozenset(SAMPLES))


def _file() -> bytes:
    family = "Survey".encode("utf-16-be")
    head = struct.pack(">IIIIHHQQhhhhHHhhh", 0x10000, 0, 0, 0x5F0F3CF5, 0, EM, 0, 0, 0, 0, EM, EM, 0, 8, 2, 1, 0)
    tables = {
        b"cmap": struct.pack(">HHHHI", 0, 1, 3, 1, 12) + _letters(),
        b"glyf": SQUARE,
        b"head": head,
        b"hhea": struct.pack(">Ihhh", 0x10000, EM, 0, 0) + struct.pack(">H11hH", EM, *[0] * 11, 2),
        b"hmtx": struct.pack(">HhHh", EM, 0, EM, 0),
        b"loca": struct.pack(">III", 0, 0, len(SQUARE)),
        b"maxp": struct.pack(">IH13H", 0x10000, 2, 4, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0),
        b"name": struct.pack(">HHH6H", 0, 1, 18, 3, 1, 0x409, 1, len(family), 0) + family,
    }
    start = 12 + 16 * len(tables)
    directory, content = struct.pack(">IHHHH", 0x10000, len(tables), 128, 3, 0), b""
    for tag, table in tables.items():
        directory += struct.pack(">4sIII", tag, 0, start + len(content), len(table))
        content += table + bytes(-len(table) % 4)
    return directory + content


def _letters() -> bytes:
    """Return a cmap subtable in format 4 that gives all letters glyph 1; its segments share one list of glyphs."""
    firsts = [*range(FIRST_LETTER, LAST_LETTER, SEGMENT), 0xFFFF]
    lasts = [*(min(first + SEGMENT - 1, LAST_LETTER) for first in firsts[:-1]), 0xFFFF]
    number = len(firsts)
    distances = [*(2 * (number - index) for index in range(number - 1)), 0]
    columns = (*lasts, 0, *firsts, *[0] * (number - 1), 1, *distances, *[1] * SEGMENT)
    body = struct.pack(f">HHHH{len(columns)}H", 2 * number, 0, 0, 0, *columns)
    return struct.pack(">HHH", 4, len(body) + 6, 0) + body
