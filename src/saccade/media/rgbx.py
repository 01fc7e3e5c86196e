"""Pictures in four bytes a pixel: red, green, blue and one that means nothing. numpy, no torch.

Pillow keeps RGB so. What comes out of decode() is the first three bytes of such memory; the fourth makes whole words of
pixels, which are copied, taken apart and resampled faster than three bytes each.
"""

import numpy as np
import numpy.typing as npt

CHANNELS = 3


def empty(height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return memory [height, width, 4]; `memory[..., :3]` is the picture in it."""
    return np.empty((height, width, 4), np.uint8)


def words(picture: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8] | None:
    """Return the memory [height, width, 4] that *picture* [height, width, 3] is a view of; None where it is not."""
    memory = picture.base
    if not isinstance(memory, np.ndarray) or not memory.flags.c_contiguous:
        return None
    same = memory.dtype == picture.dtype and memory.shape == (*picture.shape[:2], 4)
    if same and memory.ctypes.data == picture.ctypes.data and memory.strides == picture.strides:
        return memory
    return None


def split(memory: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    """Write the colours of *memory* [height, width, 4] into the planes *out* [3, height, width]."""
    pixels = memory.view("<u4")[..., 0]
    for channel in range(CHANNELS):
        # Shift and narrow whole words: twice as fast as picking every fourth byte.
        out[channel] = pixels >> np.uint32(8 * channel)
