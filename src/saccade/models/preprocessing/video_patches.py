"""Frames to patches in merged blocks, with several frames in a patch. Runs in a decode process: resizing uses torch."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from saccade.errors import InternalError
from saccade.media.resize import resize
from saccade.models.preprocessing.processor_config import CHANNELS
from saccade.protocol.media import ImageLayout


class MergedVideoPixels:
    """uint8 patches (channel, frame of the group, row, column); a group that lacks frames repeats the last one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def write(self, frames: Iterable[npt.NDArray[np.uint8]], layout: ImageLayout, out: npt.NDArray[np.uint8]) -> None:
        """Write the patches of *frames* into *out* of layout.pixel_shape, one frame at a time.

        Raises InternalError if there are more or fewer frames than in *layout*.
        """
        patch, merge, group = (self._settings[key] for key in ("patch_size", "merge_size", "temporal_patch_size"))
        num_groups, rows, columns = layout.grid
        shape = (num_groups, rows // merge, columns // merge, merge, merge, CHANNELS, group, patch, patch)
        target = out.reshape(shape, copy=False)
        count, last = 0, None
        for frame in frames:
            planes = resize(frame, layout.resized_height, layout.resized_width)
            last = planes.reshape(CHANNELS, rows // merge, merge, patch, columns // merge, merge, patch)
            last = last.transpose(1, 4, 2, 5, 0, 3, 6)
            target[count // group, ..., count % group, :, :] = last
            count += 1
        if last is None or count != len(layout.frames):
            raise InternalError(f"A video gave {count} frames instead of {len(layout.frames)}.")
        for index in range(count, num_groups * group):
            target[index // group, ..., index % group, :, :] = last
