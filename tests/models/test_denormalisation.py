"""Normalised values back to uint8: the inverse of our arithmetic and of other programs'."""

import numpy as np
import pytest
from tables import table

from saccade.errors import InvalidValue
from saccade.models.preprocessing.denormalisation import Denormaliser
from saccade.models.preprocessing.normalisation import bfloat16, tables

HALVES = ([0.5] * 3, [0.5] * 3)
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
LEVELS = np.arange(256, dtype=np.uint8)


def scaled(mean, std, dtype):
    """Level by level in float32 as SMG computes for some models: one product and one difference."""
    scale = np.float32(1) / (np.float32(255) * np.asarray(std, np.float32))
    bias = np.asarray(mean, np.float32) / np.asarray(std, np.float32)
    values = LEVELS.astype(np.float32) * scale[:, None] - bias[:, None]
    return values if dtype == "float32" else bfloat16(values)


@table("made", [tables, scaled])
@table(("settings", "dtype"), [(HALVES, "bfloat16"), (HALVES, "float32"), (CLIP, "float32")])
def test_every_level_comes_back(settings, dtype, made) -> None:
    values = np.ascontiguousarray(made(*settings, dtype)[None])
    assert (Denormaliser(*settings).levels(values) == LEVELS).all()


def test_bfloat16_of_clips_blue_channel_is_ambiguous() -> None:
    assert Denormaliser(*HALVES).takes_bfloat16
    assert not Denormaliser(*CLIP).takes_bfloat16
    blue = tables(*CLIP, "bfloat16")[2]
    assert len(set(blue.tolist())) == 255


@table("wrong", [0.0, 0.5, np.nan, np.inf, -1.01, 1.004])
@table("dtype", ["bfloat16", "float32"])
def test_a_value_that_no_level_makes_is_refused(wrong: float, dtype: str) -> None:
    values = np.array([[[1.0, wrong]] * 3], np.float32)
    with pytest.raises(InvalidValue, match="256 levels"):
        Denormaliser(*HALVES).levels(values if dtype == "float32" else bfloat16(values))


def test_images_larger_than_a_band() -> None:
    levels = np.random.default_rng(0).integers(0, 256, (5000, 3, 196), np.uint8)
    values = np.stack([table[levels[:, channel]] for channel, table in enumerate(tables(*HALVES, "bfloat16"))], 1)
    assert (Denormaliser(*HALVES).levels(values) == levels).all()
