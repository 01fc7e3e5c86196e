"""Turns frames into patches in merged blocks, with several frames in a patch. Runs in a decode process."""

import numpy as np
import numpy.typing as npt

from saccade.media.resize import resize
from saccade.models.preprocessing.decoded import DecodedVideo
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.protocol.media import ImageLayout


class MergedVideoPixels(DecodedVideo):
    """Writes uint8 patches (channel, frame of the group, row, column). A group that lacks frames repeats the last."""

    def fill(self, frame: npt.NDArray[np.uint8], number: int, layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
        patch, merge, group = (self._settings[key] for key in ("patch_size", "merge_size", "temporal_patch_size"))
        num_groups, rows, columns = layout.grid
        shape = (num_groups, rows // merge, columns // merge, merge, merge, CHANNELS, group, patch, patch)
        target = out.reshape(shape, copy=False)
        planes = resize(frame, layout.resized_height, layout.resized_width)
        blocks = planes.reshape(CHANNELS, rows // merge, merge, patch, columns // merge, merge, patch)
        is_last = number + 1 == len(layout.frames)
        for place in range(number, num_groups * group if is_last else number + 1):
            target[place // group, ..., place % group, :, :] = blocks.transpose(1, 4, 2, 5, 0, 3, 6)
