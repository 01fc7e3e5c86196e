"""Patches by rows of blocks, against the plain form of the same."""

from collections.abc import Mapping
from typing import Any

import images
import numpy as np
import numpy.typing as npt
from tables import table

from saccade.media import rgbx
from saccade.models.preprocessing import normalisation, patchify
from saccade.protocol.media import NUMPY_DTYPE

ALIKE = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
UNLIKE = {"image_mean": [0.1, 0.5, 0.7], "image_std": [0.2, 0.3, 0.2]}


def plain(planes: npt.NDArray[np.uint8], settings: Mapping[str, Any], dtype: str) -> npt.NDArray[Any]:
    """Return the patches of *planes* [3, height, width] in the wire's form: uint8, or normalised as *dtype*."""
    patch, merge = settings["patch_size"], settings["merge_size"]
    channels, height, width = planes.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    blocks = planes.reshape(channels, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    patches = blocks.reshape(-1, channels, patch * patch)
    if dtype == "uint8":
        return patches.reshape(len(patches), -1)
    tables = normalisation.tables(settings["image_mean"], settings["image_std"], dtype)
    values = np.stack([table[patches[:, channel]] for channel, table in enumerate(tables)], 1)
    return np.repeat(values[:, :, None], settings["temporal_patch_size"], 2).reshape(len(patches), -1)


@table(("patch", "merge", "frames"), [(16, 2, 2), (14, 2, 2), (8, 3, 1), (12, 1, 3), (5, 2, 2)])
@table("dtype", NUMPY_DTYPE)
@table("statistics", [ALIKE, UNLIKE])
@table("padded", [True, False])
def test_equals_the_plain_form(
    patch: int, merge: int, frames: int, dtype: str, statistics: dict[str, Any], padded: bool
) -> None:
    side = patch * merge
    settings = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": frames, **statistics}
    drawn = images.draw(5 * side, 3 * side)
    planes = np.ascontiguousarray(drawn.transpose(2, 0, 1))
    expected = plain(planes, settings, dtype)
    memory = rgbx.empty(3 * side, 5 * side)
    memory[..., :3] = drawn
    bands = patchify.bands_of_words(memory, side) if padded else patchify.bands_of_planes(planes, side)
    out = np.full(expected.shape, 7, NUMPY_DTYPE[dtype])
    if dtype == "uint8":
        patchify.write_patches(bands, settings, out, 5)
    else:
        patchify.write_normalised(bands, settings, dtype, out, 5)
    np.testing.assert_array_equal(out, expected)


def test_memory_of_any_alignment_is_written() -> None:
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, **ALIKE}
    planes = np.ascontiguousarray(images.draw(64, 32).transpose(2, 0, 1))
    for dtype, size in (("uint8", 1), ("bfloat16", 2)):
        expected = plain(planes, settings, dtype)
        out = np.frombuffer(bytearray(expected.nbytes + size), expected.dtype, offset=size).reshape(expected.shape)
        bands = patchify.bands_of_planes(planes, 32)
        if dtype == "uint8":
            patchify.write_patches(bands, settings, out, 2)
        else:
            patchify.write_normalised(bands, settings, dtype, out, 2)
        np.testing.assert_array_equal(out, expected)


def test_pairs_are_looked_up_by_their_bytes() -> None:
    pixels = np.arange(256, dtype=np.uint8).repeat(2)[1:-1]
    for dtype in ("bfloat16", "float32"):
        singles = normalisation.tables(UNLIKE["image_mean"], UNLIKE["image_std"], dtype)
        for pairs, single in zip(
            normalisation.pair_tables(UNLIKE["image_mean"], UNLIKE["image_std"], dtype), singles, strict=True
        ):
            np.testing.assert_array_equal(pairs[pixels.view("<u2")].view(single.dtype), single[pixels])


def test_channels_alike_share_a_table() -> None:
    first, second, third = normalisation.pair_tables([0.5, 0.5, 0.4], [0.5] * 3, "bfloat16")
    assert first is second
    assert first is not third
