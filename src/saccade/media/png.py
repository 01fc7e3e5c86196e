"""PNG by the decoder of Rust's png crate, in a third of the time that Pillow takes for it. In decode processes.

PNG is exact, so the pixels are the same; tests hold them together. What is not plain colour, with or without
transparency, or not without fault, is left to Pillow and its judgement. The chunks' checksums are compared, that of the
zlib stream inside them is not.
"""

import kornia_rs
import numpy as np
import numpy.typing as npt

VERSION: str = kornia_rs.__version__
PLAIN = {"RGB": b"\x08\x02\0\0\0", "RGBA": b"\x08\x06\0\0\0"}
"""Eight bits, the colour type, and the only ways to compress and filter, not interlaced (PNG, section 11.2.1)."""

SPARE_BYTES = 4 << 20
"""What decoding takes beyond the pixels."""


def decode(encoded: bytes, height: int, width: int, mode: str = "RGB") -> npt.NDArray[np.uint8] | None:
    """Return a PNG without metadata, *height* x *width*, as [height, width, 3], uint8; None for Pillow's cases.

    It is [height, width, 4] where *mode* is RGBA instead of RGB. The file must have that mode.
    Raises MemoryError where memory ends.
    """
    # A chunk between header and pixels names a transparent colour, or is none that a plain picture has.
    if encoded[24:29] != PLAIN[mode] or encoded[37:41] != b"IDAT":
        return None
    # Rust ends or hangs a process whose memory ends; numpy says so.
    np.empty(height * width * len(mode) + SPARE_BYTES, np.uint8)
    try:
        pixels: npt.NDArray[np.uint8] = kornia_rs.io.decode_image_png_u8(encoded, (height, width), mode.lower())
    except Exception:  # the library raises nothing narrower
        return None
    return pixels
