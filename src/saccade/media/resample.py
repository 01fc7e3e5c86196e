"""Bit-exact Pillow resampling, for families whose reference processor uses Pillow. Runs only in decode processes."""

import numpy as np
import numpy.typing as npt
from PIL import Image

from saccade.media import rgbx


def resample(image: npt.NDArray[np.uint8], height: int, width: int, kernel: Image.Resampling) -> npt.NDArray[np.uint8]:
    """Return *image* [old height, old width, 3] as [*height*, *width*, 3], uint8, resized by Pillow's *kernel*.

    A fourth channel is alpha; the colours are weighted by it, as in Pillow.

    The horizontal pass comes first, then the vertical one, each rounded to uint8. These are two calls because in a
    single call Pillow 13 chooses the order itself, while the reference processors rely on the older, fixed order. If
    the size does not change, *image* itself is returned. Raises MemoryError if an allocation fails.
    """
    old_height, old_width, channels = image.shape
    if (old_height, old_width) == (height, width):
        return image
    has_alpha = channels > rgbx.CHANNELS
    memory = rgbx.words(image)
    resized = Image.fromarray(image) if memory is None else Image.fromarray(memory, "RGBX").convert("RGB")
    if has_alpha:
        resized = resized.convert("RGBa")
    if old_width != width:
        resized = resized.resize((width, old_height), kernel)
    if old_height != height:
        resized = resized.resize((width, height), kernel)
    return np.asarray(resized.convert("RGBA") if has_alpha else resized)
