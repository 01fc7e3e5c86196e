"""A decoded picture to the patches of the wire. Runs in a decode process."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.media.resize import resize
from saccade.models.preprocessing import merge_blocks
from saccade.protocol.media import PictureLayout


class Pixels:
    """Patches of Qwen3-VL, 16 x 16, in merged blocks: uint8 of one frame; normalised and doubled on foreign wires."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def write(self, picture: npt.NDArray[np.uint8], layout: PictureLayout, out: npt.NDArray[Any]) -> None:
        """Write the patches of *picture* [height, width, 3] into *out* of layout.pixel_shape.

        Raises InternalError where *layout* was made for another size, MemoryError where memory ends.
        """
        height, width, _ = picture.shape
        merge_blocks.check_layout(width, height, self._settings, layout)
        planes = resize(picture, layout.resized_height, layout.resized_width)
        if layout.pixel_dtype == "uint8":
            merge_blocks.write_patches(planes, self._settings, out)
        else:
            merge_blocks.write_normalised(planes, self._settings, layout.pixel_dtype, out)
