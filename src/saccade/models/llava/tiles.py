"""LLaVA-NeXT's high-resolution arithmetic: an image's tiles, and the features that remain. Does not import torch.

The gateway and the engine both count with `num_features`. Sources: LLaVA-NeXT (blog post of January 2024, "anyres");
transformers 5.23, image_processing_utils.py (select_best_resolution, get_patch_output_size),
models/llava_next/processing_llava_next.py (_get_unpadded_features) and modeling_llava_next.py (pack_image_features,
unpad_image). Their rounding is part of the rule. Sizes are (height, width) in pixels, counts are (rows, columns).
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NEWLINE = -1
"""The entry in `feature_order` for the learned feature that ends each row."""


def best_resolution(height: int, width: int, pinpoints: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the first pinpoint that keeps the most image pixels and, among those, has the least padding."""

    def merit(pinpoint: Sequence[int]) -> tuple[int, int]:
        pinpoint_height, pinpoint_width = pinpoint
        scale = min(pinpoint_width / width, pinpoint_height / height)
        num_pixels = min(int(width * scale) * int(height * scale), width * height)
        return num_pixels, num_pixels - pinpoint_height * pinpoint_width

    best_height, best_width = max(pinpoints, key=merit)
    return best_height, best_width


def fitted(height: int, width: int, resolution: tuple[int, int]) -> tuple[int, int]:
    """Return the size of the image resized to fit *resolution*, with its aspect ratio kept."""
    target_height, target_width = resolution
    scale_height, scale_width = target_height / height, target_width / width
    if scale_width < scale_height:
        return min(math.ceil(height * scale_width), target_height), target_width
    return target_height, min(math.ceil(width * scale_height), target_width)


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return how many of the padded image's *rows* and *columns* of features remain without the padding."""
    if width / height > columns / rows:
        length = int(round(height * (columns / width), 7))
        return rows - (rows - length) // 2 * 2, columns
    length = int(round(width * (rows / height), 7))
    return rows, columns - (columns - length) // 2 * 2


def num_features(unpadded_size: tuple[int, int]) -> int:
    """Return the number of features of the tiles: *unpadded_size* (rows, columns), and a newline after each row."""
    rows, columns = unpadded_size
    return rows * (columns + 1)


def feature_order(rows: int, columns: int, unpadded_size: tuple[int, int], view_side: int) -> npt.NDArray[np.int64]:
    """Return which features of an image's views the text network gets, in order; NEWLINE ends each row of the tiles.

    A feature's index counts through the base view, then through the tiles, each by rows of *view_side* features.
    Of the padded image's *rows* and *columns*, only a middle part of *unpadded_size* is kept.
    """
    base = np.arange(view_side**2)
    tiles = np.arange(len(base), len(base) + rows * columns)
    by_tile = tiles.reshape(rows // view_side, columns // view_side, view_side, view_side)
    image = by_tile.swapaxes(1, 2).reshape(rows, columns)
    kept_rows, kept_columns = unpadded_size
    top, left = (rows - kept_rows) // 2, (columns - kept_columns) // 2
    middle = image[top : top + kept_rows, left : left + kept_columns]
    return np.concatenate((base, np.pad(middle, ((0, 0), (0, 1)), constant_values=NEWLINE).ravel()))


def smallest(pinpoints: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the pinpoints with the least area, in their order."""
    least = min(height * width for height, width in pinpoints)
    return [[height, width] for height, width in pinpoints if height * width == least]
