"""Resizes uint8 images, bit for bit as torchvision does. Runs only in decode processes.

cykooz-resizer uses torch's arithmetic and is as fast, but makes the two passes in another order, so each pass is a
separate call. It has builds only for x86-64, and its weights have fewer bits when an image shrinks strongly. So numpy
resizes such images, and all images on other CPUs.
"""

import platform

import numpy as np
import numpy.typing as npt

from saccade.media import rgbx
from saccade.media.exact_resize import Mode, resize_planes

HAS_FAST_PASSES = platform.machine() == "x86_64"
if HAS_FAST_PASSES:
    from saccade.media import fast_passes

MAX_SHRINKING = 100
"""From 128 on the largest weight has 15 bits in torch at a precision that the library does not reach."""


def resize(image: npt.NDArray[np.uint8], height: int, width: int, mode: Mode = "bicubic") -> npt.NDArray[np.uint8]:
    """Return *image* [old height, old width, 3] as planes [3, *height*, *width*], uint8.

    As in torchvision, which the reference processors use, it antialiases, makes the horizontal pass first, and rounds
    each pass to uint8. If the size does not change, the result is a view; otherwise it may be a view of rgbx memory.
    Raises MemoryError if an allocation fails.
    """
    old_height, old_width, _ = image.shape
    if (old_height, old_width) == (height, width):
        return image.transpose(2, 0, 1)
    shrinks = max(old_height / height, old_width / width)
    if not HAS_FAST_PASSES or shrinks > MAX_SHRINKING:
        return resize_planes(image, height, width, mode)
    return fast_passes.resized(image, height, width, mode)[..., : rgbx.CHANNELS].transpose(2, 0, 1)
