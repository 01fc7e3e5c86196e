"""Bit-exact uint8 resampling, equal to torchvision's. Uses torch, in decode processes only."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from saccade.errors import InternalError
from saccade.media import rgbx

Mode = Literal["bicubic", "lanczos"]


def resize(image: npt.NDArray[np.uint8], height: int, width: int, mode: Mode = "bicubic") -> npt.NDArray[np.uint8]:
    """Return *image* [old height, old width, channels] as planes [channels, *height*, *width*], uint8.

    Bicubic or Lanczos, with antialiasing, horizontal pass first, each pass rounded to uint8: torchvision's resize in
    the reference processors. Without a change of size the result is a view. Raises MemoryError if an allocation fails,
    InternalError if torch does not have the filter.
    """
    if image.shape[:2] == (height, width):
        return image.transpose(2, 0, 1)
    # Resize all four bytes: channels do not mix, and torch would copy a view of three of them first.
    memory = rgbx.words(image)
    pixels_NCHW = torch.from_numpy(image if memory is None else memory).permute(2, 0, 1)[None]
    try:
        resized_NCHW = functional.interpolate(pixels_NCHW, (height, width), mode=mode, antialias=True)
    except ValueError as error:
        raise InternalError(f"This torch cannot resize by {mode}; install torch 2.12 or newer.") from error
    except RuntimeError as error:
        # Torch raises this for a failed allocation; no other cause is possible, since size and dtype are valid.
        raise MemoryError from error
    planes: npt.NDArray[np.uint8] = resized_NCHW[0, : image.shape[2]].numpy()
    return planes
