"""A decoded picture to the patches of the wire. Runs in a decode process."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import InternalError
from saccade.media.resize import resize
from saccade.models.preprocessing import merge_blocks
from saccade.protocol.media import PictureLayout


class Pixels:
    """Patches of Qwen3-VL: one frame of uint8, 16 x 16, in merged blocks."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def write(self, picture: npt.NDArray[np.uint8], layout: PictureLayout, out: npt.NDArray[np.uint8]) -> None:
        """Write the patches of *picture* [height, width, 3] into *out*, uint8 of layout.pixel_shape.

        Raises InternalError where *layout* was made for another size, MemoryError where memory ends.
        """
        height, width, _ = picture.shape
        if merge_blocks.picture_layout(width, height, self._settings) != layout:
            raise InternalError("The picture decoded to another size than the one its tokens were counted for.")
        planes = resize(picture, layout.resized_height, layout.resized_width)
        merge_blocks.write_patches(planes, self._settings, out)
