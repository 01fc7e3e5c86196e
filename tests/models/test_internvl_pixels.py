"""Layout of InternVL against the reference processor. The conformance suite compares pixels. A3, F4"""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tables import table

from saccade.errors import InternalError, InvalidValue, StartupError
from saccade.models.family import ImageOptions
from saccade.models.internvl.layout import Layout, tiles
from saccade.models.internvl.pixels import Pixels

VISION = {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True}
CONFIG = {"vision_config": VISION}
COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
PREPROCESSOR = {**COLOURS, "size": {"height": 56, "width": 56}}
CHAT = {
    "llm_config": {}, "vision_config": {**VISION, "image_size": 56, "patch_size": 14}, "force_image_size": 56,
    "min_dynamic_patch": 1, "max_dynamic_patch": 6, "use_thumbnail": True,
}  # fmt: skip


@given(
    width=st.integers(1, 6_000),
    height=st.integers(1, 6_000),
    limits=st.sampled_from([(1, 12), (1, 6), (2, 40), (1, 1)]),
)
@example(width=448, height=448, limits=(1, 12))
@example(width=896, height=448, limits=(1, 12))
@example(width=6_000, height=1, limits=(2, 40))
@hypothesis_settings(max_examples=60, deadline=None)
def test_tiles_equal_the_reference(width: int, height: int, limits: tuple[int, int]) -> None:
    from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas

    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), *limits)
    assert tiles(height, width, 448, *limits) == (rows, columns)


def test_views_of_an_image() -> None:
    layout = Layout(CONFIG, PREPROCESSOR)
    wide = layout.image(400, 100, layout.settings)
    assert (wide.grid, wide.pixel_shape, wide.prompt) == ((1, 4, 16), (5, 3, 56, 56), ("<img>", 20, "</img>"))
    low = layout.image(400, 100, layout.settings_for(ImageOptions(detail="low")))
    assert (low.grid, low.pixel_shape, low.num_tokens) == ((1, 4, 4), (1, 3, 56, 56), 4)
    with pytest.raises(InvalidValue, match="max_pixels"):
        layout.settings_for(ImageOptions(max_pixels=5))


def test_both_forms_have_the_same_settings() -> None:
    ours = Layout(CONFIG, {**PREPROCESSOR, "max_patches": 6})
    assert Layout(CHAT, {**COLOURS, "size": 56}).settings == ours.settings


def test_an_image_of_another_size_is_an_error() -> None:
    import numpy as np

    layout = Layout(CONFIG, PREPROCESSOR)
    shape = layout.image(400, 100, layout.settings)
    with pytest.raises(InternalError):
        Pixels(layout.settings).write(np.zeros((10, 10, 3), np.uint8), shape, np.zeros(shape.pixel_shape, np.uint8))


@table(
    ("config", "preprocessor", "named"),
    [  # A9
        (CONFIG, {**PREPROCESSOR, "size": {"height": 48, "width": 48}}, "size"),
        (CONFIG, {**PREPROCESSOR, "size": {"height": 56, "width": 48}}, "equal height"),
        (CONFIG, {**PREPROCESSOR, "min_patches": 0}, "min_patches"),
        (CONFIG, {**PREPROCESSOR, "min_patches": 7, "max_patches": 6}, "max_patches"),
        (CONFIG, {**PREPROCESSOR, "do_resize": False}, "do_resize"),
        (CONFIG, {"size": 56}, "image_mean"),
        ({**CONFIG, "downsample_ratio": 0.3}, PREPROCESSOR, "downsample_ratio"),
        ({**CONFIG, "vision_feature_layer": -2}, PREPROCESSOR, "vision_feature_layer"),
        ({"vision_config": {**VISION, "use_qk_norm": True}}, PREPROCESSOR, "use_qk_norm"),
        ({"vision_config": {**VISION, "attention_bias": False}}, PREPROCESSOR, "attention_bias"),
        ({"vision_config": 5}, PREPROCESSOR, "vision_config"),
        ({**CHAT, "ps_version": "v1"}, COLOURS, "ps_version"),
        ({**CHAT, "use_thumbnail": False}, COLOURS, "use_thumbnail"),
        ({**CHAT, "force_image_size": 112}, COLOURS, "force_image_size"),
    ],
)
def test_wrong_files_stop_the_start(config: Any, preprocessor: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        Layout(config, preprocessor)
