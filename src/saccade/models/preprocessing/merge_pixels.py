"""Turns a decoded image into patches in merged blocks. Runs in a decode process."""

from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.media import rgbx
from saccade.media.resize import resize
from saccade.models.preprocessing import patchify, smart_resize
from saccade.models.preprocessing.decoded import DecodedImage
from saccade.protocol.media import ImageLayout


class PatchifyPixels(DecodedImage):
    """Writes patches in merged blocks: uint8 with one frame, or normalised with every frame for external wires."""

    layout_of = staticmethod(smart_resize.image_layout)

    def fill(self, image: npt.NDArray[np.uint8], layout: ImageLayout, out: npt.NDArray[Any]) -> None:
        """Write the patches of *image* [height, width, 3]."""
        side = self._settings["patch_size"] * self._settings["merge_size"]
        columns = layout.resized_width // side
        bands = _bands(image, layout, side)
        if layout.pixel_dtype == "uint8":
            patchify.write_patches(bands, self._settings, out, columns)
        else:
            patchify.write_normalised(bands, self._settings, layout.pixel_dtype, out, columns)

    def to_image(self, patches: npt.NDArray[np.uint8], layout: ImageLayout) -> npt.NDArray[np.uint8]:
        """Return the resized image [height, width, 3] that *patches* show."""
        patch, merge = self._settings["patch_size"], self._settings["merge_size"]
        _, rows, columns = layout.grid
        blocks = patches.reshape(rows // merge, columns // merge, merge, merge, -1, patch, patch)
        return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(layout.resized_height, layout.resized_width, -1)


def _bands(image: npt.NDArray[np.uint8], layout: ImageLayout, height: int) -> patchify.Bands:
    """Return the rows of blocks of *image*, resized to *layout* if the sizes differ."""
    planes = resize(image, layout.resized_height, layout.resized_width)
    memory = rgbx.words(planes.transpose(1, 2, 0))
    if memory is not None:
        return patchify.bands_of_words(memory, height)
    return patchify.bands_of_planes(np.ascontiguousarray(planes), height)
