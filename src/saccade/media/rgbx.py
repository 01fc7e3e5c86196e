"""Images with four bytes per pixel: red, green, blue and an unused one. This module uses numpy, not torch.

Pillow stores RGB in this form. Except for plain PNG, decode() returns RGB as a view of each pixel's first three bytes.
With the fourth byte, a pixel is one 32-bit word, which is faster to copy, split and resample than three bytes.
"""

import numpy as np
import numpy.typing as npt

CHANNELS = 3


def empty(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return uninitialised memory [height, width, 4], uint8; `memory[..., :3]` is the image."""
    return np.empty((height, width, 4), np.uint8)


def words(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | None:
    """Return the memory [height, width, 4] that *image* [height, width, 3] is a view of; None if there is none.

    An image with alpha uses its fourth byte, so for such an image there is none.
    """
    memory = image.base
    if image.shape[2] != CHANNELS or not isinstance(memory, np.ndarray) or not memory.flags.c_contiguous:
        return None
    same = memory.dtype == image.dtype and memory.shape == (*image.shape[:2], 4)
    if same and memory.ctypes.data == image.ctypes.data and memory.strides == image.strides:
        return memory
    return None


def split(memory: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """Write the colours of *memory* [height, width, 4] to the planes *out* [3, height, width]."""
    pixels = memory.view("<u4")[..., 0]
    for channel in range(CHANNELS):
        # Shifting and narrowing whole words is twice as fast as copying every fourth byte.
        out[channel] = pixels >> np.uint32(8 * channel)
