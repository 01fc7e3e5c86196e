"""Decodes JPEG with libjpeg-turbo directly, without the copies that Pillow makes. Runs in decode processes.

Pillow uses the same library with the same settings (exact DCT, smooth upsampling), so the pixels are equal; tests
verify this. Pillow decodes damaged images, and images that are not plain colour or grey.
"""

import numpy as np
import numpy.typing as npt
import simplejpeg

from saccade.media import rgbx

VERSION: str = simplejpeg.__version__
SAME_AS_PILLOW = frozenset({"YCbCr", "Gray"})


def decode(encoded: bytes, height: int, width: int) -> npt.NDArray[np.uint8] | None:
    """Return a JPEG of *height* x *width* as RGB [height, width, 3], a view of rgbx memory; None if it needs Pillow."""
    try:
        *size, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        if size != [height, width] or colours not in SAME_AS_PILLOW:
            return None
        memory = rgbx.empty(height, width)
        simplejpeg.decode_jpeg(encoded, "RGBX", buffer=memory)
    except ValueError:
        return None
    return memory[..., : rgbx.CHANNELS]
