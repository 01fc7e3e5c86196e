"""Computes the order in which an image's features become tokens. Does not import torch.

Source: image_embedding_phi3_v.py of the release (hd_feature_transform, order sub_glb).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from saccade.models.phi3_v.layout import TOKENS_PER_CROP, TOKENS_PER_SIDE

NEWLINE, SEPARATOR, FIRST_VIEW = 0, 1, 2
"""Rows of the table that feature_order points into: both learned vectors, then the features of all views by rows."""


def feature_order(images: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return each token's row in the table of features, for *images* given as (rows, columns) of crops.

    An image's views are its global view, then its crops by rows. Its tokens are the crops' features, row by row across
    the whole image, then the separator and the global view's features. A newline ends every row of features.
    """
    orders, view = [], FIRST_VIEW
    for rows, columns in images:
        overview, details = _placed(1, 1, view), _placed(rows, columns, view + TOKENS_PER_CROP)
        orders += [details, np.array([SEPARATOR]), overview]
        view += (1 + rows * columns) * TOKENS_PER_CROP
    return np.concatenate(orders)


def _placed(rows: int, columns: int, first: int) -> npt.NDArray[np.int64]:
    """Return the features of *rows* x *columns* views, row by row across the image, with a newline after each row."""
    side = TOKENS_PER_SIDE
    views = np.arange(first, first + rows * columns * side**2).reshape(rows, columns, side, side)
    lines = views.swapaxes(1, 2).reshape(rows * side, columns * side)
    return np.pad(lines, ((0, 0), (0, 1)), constant_values=NEWLINE).ravel()
