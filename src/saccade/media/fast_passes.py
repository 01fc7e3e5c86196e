"""Runs the two passes of a resize with cykooz-resizer, on four bytes per pixel. Runs only on x86-64."""

import numpy as np
import numpy.typing as npt
from cykooz_resizer import FilterType, ResizeAlg, ResizeOptions, Resizer
from PIL import Image

from saccade.media import rgbx
from saccade.media.exact_resize import Mode

FILTERS: dict[Mode, FilterType] = {
    "bilinear": FilterType.bilinear,
    "bicubic": FilterType.catmull_rom,
    "lanczos": FilterType.lanczos3,
}


def resized(image: npt.NDArray[np.uint8], height: int, width: int, mode: Mode) -> npt.NDArray[np.uint8]:
    """Return *image* [old height, old width, 3] as rgbx memory [*height*, *width*, 4], resized by *mode*.

    Raises MemoryError if an allocation fails.
    """
    memory = rgbx.words(image)
    if memory is None:
        memory = rgbx.empty(*image.shape[:2])
        memory[..., : rgbx.CHANNELS] = image
    options = ResizeOptions(resize_alg=ResizeAlg.convolution(FILTERS[mode]), use_alpha=False)
    old_height, old_width, _ = memory.shape
    if old_width != width:
        memory = _one_pass(memory, old_height, width, options)
    if old_height != height:
        memory = _one_pass(memory, height, width, options)
    return memory


def _one_pass(memory: npt.NDArray[np.uint8], height: int, width: int, options: ResizeOptions) -> npt.NDArray[np.uint8]:
    out = rgbx.empty(height, width)
    Resizer().resize_pil(_mapped(memory), _mapped(out), options)
    return out


def _mapped(memory: npt.NDArray[np.uint8]) -> Image.Image:
    """Return Pillow's view of *memory* [height, width, 4], without a copy.

    Its mode is CMYK, whose four bytes per pixel do not affect each other.
    """
    height, width, _ = memory.shape
    return Image.frombuffer("CMYK", (width, height), memory, "raw", "CMYK", 0, 1)
