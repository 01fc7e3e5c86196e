"""BMP: pixels equal Pillow's, other kinds are refused by name, and runs cost a step for each code."""

import io
import struct
import sys
from collections import Counter
from types import FrameType
from typing import Any

import bitmaps
import numpy as np
import pytest
from bitmaps import bmp, rows
from PIL import Image
from tables import table

from saccade.errors import InvalidImage, UnsupportedImageFormat
from saccade.media import bmp as decoder
from saccade.media.decode import decode
from saccade.media.header import ImageLimits, read_header

RUNS_8, RUNS_4 = 1, 2


@table("name", bitmaps.corpus())
def test_header_agrees_with_pillow(name: str) -> None:
    header = read_header(bitmaps.corpus()[name])
    with Image.open(io.BytesIO(bitmaps.corpus()[name])) as image:
        assert (header.format, *header.upright) == (image.format, *image.size)


@table(
    ("encoded", "sentence"),
    [
        (
            bmp(0, b"\xff\xd8", coding=4, palette=b""),
            "contains a JPEG, which is not supported; send the JPEG by itself",
        ),
        (bmp(0, b"\x89PNG", coding=5, palette=b""), "contains a PNG, which is not supported; send the PNG by itself"),
        (bmp(2, rows(2)), "has 2 bits a pixel in coding 0"),
        (bmp(64, rows(64)), "has 64 bits a pixel in coding 0"),
        (bmp(24, rows(24), coding=1), "has 24 bits a pixel in coding 1"),
        (bmp(8, rows(8), coding=2), "has 8 bits a pixel in coding 2"),
        (bmp(32, rows(32), coding=6, masks=(1, 2, 4, 8)), "has 32 bits a pixel in coding 6"),
        (bmp(1, b"", coding=3, header=64), "has 1 bits a pixel in coding 3"),
        (bmp(24, b"", coding=4, header=64), "has 24 bits a pixel in coding 4"),
        (bmp(24, rows(24), coding=3, header=64), "has 24 bits a pixel in coding 3"),
        (bmp(16, rows(16), coding=3, masks=(0xF00, 0xF0, 0xF)), "has unusual masks of colours"),
        (bmp(32, rows(32), coding=3, header=56, masks=(0x3FF, 0xFFC00, 0x3FF00000, 0)), "has unusual masks of colours"),
    ],
)
def test_other_kinds_are_refused_by_name(encoded: bytes, sentence: str) -> None:
    with pytest.raises(UnsupportedImageFormat, match=f"^The BMP {sentence}"):
        decode(encoded, ImageLimits())


@table(
    ("encoded", "sentence"),
    [
        (b"BMW makes cars, and this is a text about one.", "begins like a BMP"),
        (b"BM\x36\0\0\0", "ends within its header"),
        (bmp(24, rows(24), header=16), "begins like a BMP"),
        (bmp(24, rows(24), size=(-37, 23)), "states -37 x 23 pixels"),
        (bmp(24, rows(24), size=(37, 0)), "states 37 x 0 pixels"),
        (bmp(24, rows(24), size=(30_000, 1_600)), "has fewer bytes than its pixels take"),
        (bmp(24, rows(24), size=(37, -24)), "has fewer bytes than its pixels take"),
        (bmp(24, rows(24)[:-2]), "has fewer bytes than its pixels take"),
        (bmp(8, rows(8), colours=257), "palette has 257 colours"),
        (bmp(8, rows(8), colours=1 << 31, palette=b""), "palette has 2147483648 colours"),
        (bmp(8, b"\5\7\0", coding=RUNS_8), "its runs end before the image does"),
        (bmp(8, b"\0\5\1\2", coding=RUNS_8), "its runs end before the image does"),
        (bmp(8, b"", coding=RUNS_8, palette=bytes(9)), "its palette is cut"),
    ],
)
def test_damaged_ones_are_invalid(encoded: bytes, sentence: str) -> None:
    with pytest.raises(InvalidImage, match=sentence):
        decode(encoded, ImageLimits())


def test_runs_of_four_bits_and_an_odd_length_are_whole() -> None:
    """Three pixels written out in two bytes, and one more. Pillow omits the third."""
    palette = b"".join(bytes((i, i, i, 0)) for i in range(16))
    encoded = bmp(4, b"\0\3\x12\x30\1\x40\0\1", size=(4, 1), coding=RUNS_4, palette=palette)
    assert decode(encoded, ImageLimits())[0, :, 0].tolist() == [1, 2, 3, 4]


def test_pixels_that_runs_leave_out_have_the_first_colour() -> None:
    decoded = decode(bmp(8, b"\2\1\0\1", size=(3, 2), coding=RUNS_8), ImageLimits())
    first, second = bitmaps.PALETTE[2::-1], bitmaps.PALETTE[6:3:-1]
    assert decoded.tobytes() == first * 3 + second * 2 + first


def test_short_rows_cost_a_step_for_each_code() -> None:
    """Each row has one pixel of 32 768; Pillow takes a step for each of the 50 million that are missing."""
    width, height = 32_768, 1_500
    events = Counter[str]()
    encoded = bmp(8, b"\1\7\0\0" * height, size=(width, height), coding=RUNS_8)

    def count(_frame: FrameType, event: str, _: object) -> Any:
        events[event] += 1
        return count

    tracer = sys.gettrace()
    sys.settrace(count)
    try:
        indexed = decoder.decode(encoded)
    finally:
        sys.settrace(tracer)
    assert indexed is not None
    assert events["line"] < 20 * 2 * height


def test_an_offset_of_zero_means_after_the_palette() -> None:
    whole = bitmaps.corpus()["bmp of 8 bits"]
    np.testing.assert_array_equal(
        decode(whole[:10] + struct.pack("<I", 0) + whole[14:], ImageLimits()), decode(whole, ImageLimits())
    )
