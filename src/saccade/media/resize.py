"""Bit-exact uint8 resampling, as the reference processors do it. Torch, in decode processes only."""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from saccade.media import rgbx


def resize(picture: npt.NDArray[np.uint8], height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return *picture* [old height, old width, channels] as planes [channels, *height*, *width*], uint8.

    Bicubic with antialiasing, horizontal pass first, each pass rounded to uint8: torchvision's resize in the reference
    processors. The picture's own size comes back as a view, not copied. Raises MemoryError where memory ends.
    """
    if picture.shape[:2] == (height, width):
        return picture.transpose(2, 0, 1)
    # Channels do not mix, and torch would first copy a picture that leaves out every fourth byte.
    memory = rgbx.words(picture)
    pixels_NCHW = torch.from_numpy(picture if memory is None else memory).permute(2, 0, 1)[None]
    try:
        resized_NCHW = functional.interpolate(pixels_NCHW, (height, width), mode="bicubic", antialias=True)
    except RuntimeError as error:
        # Torch reports a failed allocation so; size and dtype are right by construction.
        raise MemoryError from error
    planes: npt.NDArray[np.uint8] = resized_NCHW[0, : picture.shape[2]].numpy()
    return planes
