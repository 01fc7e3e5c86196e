"""Layout and patches of Kimi-K3; the release's own algorithm is in the conformance suite. A1-A3, F4"""

from typing import Any

import numpy as np
import pytest
from checkpoints.kimi_k3 import MEDIA_PROC_CFG
from tables import table

from saccade.errors import InternalError, StartupError
from saccade.models.kimi_k3.layout import BOARD, Layout
from saccade.models.kimi_k3.pixels import Pixels

LAYOUT = Layout({}, {"media_proc_cfg": MEDIA_PROC_CFG})


def test_missing_settings_are_the_releases() -> None:
    assert Layout({}, {}).settings == LAYOUT.settings
    assert LAYOUT.settings["in_patch_limit"] == 65_536


def test_the_prompt_names_the_size_before_the_resize() -> None:
    layout = LAYOUT.image(8000, 6000, LAYOUT.settings)
    assert layout.prompt == (
        "<|media_begin|>",
        "image 8000x6000",
        "<|media_content|>",
        layout.num_tokens,
        "<|media_end|>",
    )
    assert layout.num_tokens > 16_384 // 4


def test_a_transparent_image_shows_the_board() -> None:
    layout = LAYOUT.image(28, 28, LAYOUT.settings)
    out = np.empty(layout.pixel_shape, np.uint8)
    pixels = Pixels(LAYOUT.settings)
    pixels.write_pixels(np.zeros((28, 28, 4), np.uint8), layout, out)
    shown = pixels.to_image(out, layout)[..., 0]
    assert [shown[0, 0], shown[0, 8], shown[8, 0], shown[8, 8]] == [255, 180, 180, 255]


def test_a_layout_of_another_size_is_refused() -> None:
    layout = LAYOUT.image(100, 200, LAYOUT.settings)
    with pytest.raises(InternalError):
        Pixels(LAYOUT.settings).write_pixels(
            np.zeros((28, 28, 4), np.uint8), layout, np.empty(layout.pixel_shape, np.uint8)
        )


@table(
    "wrong",
    [
        {"pattern": "black"},
        {"chessboard_square_size": 0},
        {"chessboard_square_on_top_left": 1},
        {"chessboard_gray_value": 256},
        {"chessboard_white_value": None},
    ],
)
def test_another_board_stops_the_start(wrong: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=BOARD):
        Layout({}, {BOARD: wrong})


@table("wrong", [{"transparent_bg_fill_stage": "before_resize"}, {BOARD: "black"}, {"fixed_output_tokens": 9}])
def test_other_settings_stop_the_start(wrong: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match=next(iter(wrong))):
        Layout({}, wrong)
