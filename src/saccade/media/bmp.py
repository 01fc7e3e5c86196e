"""Decodes run-length encoded (RLE) BMP. Runs in decode processes.

Pillow's RLE decoder takes a step for each pixel that a short row lacks, so a file of kilobytes can take minutes. This
one takes a step for each code. If a literal run has an odd number of four-bit pixels, Pillow omits the last one; here
it counts, as the format says. Pillow decodes other BMPs.
"""

import numpy as np
from PIL import Image

from saccade.errors import InvalidImage
from saccade.media import bmp_header
from saccade.media.bmp_header import RLE4, RLE8, BmpHeader

END_OF_ROW, END_OF_IMAGE, MOVE = 0, 1, 2
VALUES = bytes.maketrans(b"0123456789abcdef", bytes(range(16)))
"""From hexadecimal digits, which are pixels of four bits."""


def decode(encoded: bytes) -> Image.Image | None:
    """Return a run-length encoded BMP as RGB, or None for other BMPs, which Pillow decodes.

    Pixels that the runs leave out have the first colour. Raises InvalidImage if the palette or the runs end early, and
    the errors of bmp_header.read().
    """
    header = bmp_header.read(encoded)
    if header.coding not in (RLE8, RLE4):
        return None
    end = header.palette + header.colours * header.entry_bytes
    if len(encoded) < end:
        raise InvalidImage("The BMP is truncated: its palette is cut.")
    first_row = 1 if header.is_top_down else -1
    indices = np.frombuffer(_expanded(encoded, header), np.uint8)
    image = Image.frombuffer("P", (header.width, header.height), indices, "raw", "P", 0, first_row)
    image.putpalette(encoded[header.palette : end], "BGR" if header.entry_bytes == 3 else "BGRX")
    return image.convert("RGB")


def _expanded(encoded: bytes, header: BmpHeader) -> bytearray:
    """Return each pixel's palette index, with rows in the file's order. Pixels beyond a row's end are dropped."""
    width, height, of_nibbles = header.width, header.height, header.coding == RLE4
    indices = bytearray(width * height)
    position, x, y = header.pixels, 0, 0
    try:
        while y < height and not (y == height - 1 and x >= width):
            count, value = encoded[position], encoded[position + 1]
            position += 2
            if count:
                run = bytes((value >> 4, value & 15)) * (count + 1 >> 1) if of_nibbles else bytes((value,)) * count
            elif value == END_OF_ROW:
                x, y = 0, y + 1
                continue
            elif value == END_OF_IMAGE:
                break
            elif value == MOVE:
                x, y = x + encoded[position], y + encoded[position + 1]
                position += 2
                continue
            else:  # as many pixels, written out; the next code begins at an even byte
                count, num_bytes = value, value + 1 >> 1 if of_nibbles else value
                run = encoded[position : position + num_bytes]
                position += num_bytes + 1 & ~1
                if len(run) < num_bytes:
                    raise IndexError
                if of_nibbles:
                    run = run.hex().encode().translate(VALUES)
            end = min(x + count, width)
            if x < end:
                indices[y * width + x : y * width + end] = run[: end - x]
            x = end
    except IndexError:
        raise InvalidImage("The BMP is truncated: its runs end before the image does.") from None
    return indices
