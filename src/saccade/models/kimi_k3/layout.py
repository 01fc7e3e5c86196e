"""Computes an image's grid, token count and text from its dimensions. Runs in the gateway, without torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec

from saccade.errors import StartupError
from saccade.models.preprocessing import navit_settings
from saccade.models.preprocessing.navit_layout import NavitLayout
from saccade.models.preprocessing.processor_config import whole_number
from saccade.protocol.media import ImageLayout
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

RELEASE: Final[Mapping[str, Any]] = MappingProxyType({**navit_settings.RELEASE, "in_patch_limit": 65_536})
BOARD: Final = "transparent_bg_config"
FIXED: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **{key: value for key, value in navit_settings.FIXED.items() if key != BOARD},
        "transparent_bg_fill_stage": "after_resize",
    }
)
BOARD_RELEASE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "pattern": "chessboard",
        "chessboard_square_size": 8,
        "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255,
        "chessboard_gray_value": 180,
    }
)
"""The board on which transparent images are composited: the release's values."""


class Layout(NavitLayout):
    """The layout of Kimi-K3's images: at most 65536 patches by default. The prompt names the original size."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        resolved = navit_settings.resolve(config, preprocessor, RELEASE, FIXED)
        self.settings = {**resolved, BOARD: _board(preprocessor.get(navit_settings.NESTED, preprocessor))}

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return the layout with the text around the placeholders, which names the image's own *width* and *height*."""
        layout = super().image(width, height, settings)
        size = f"image {width}x{height}"
        prompt = ("<|media_begin|>", size, "<|media_content|>", layout.num_tokens, "<|media_end|>")
        return msgspec.structs.replace(layout, prompt=prompt)


def _board(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the board's settings. Raises StartupError."""
    match options.get(BOARD):
        case None:
            board = dict(BOARD_RELEASE)
        case dict(given):
            board = {**BOARD_RELEASE, **given}
        case given:
            raise StartupError(f"{PREPROCESSOR_CONFIG}: {BOARD} must be an object, not {given!r}.")
    whole_number(board["chessboard_square_size"], f"{BOARD}.chessboard_square_size")
    shades = [board["chessboard_white_value"], board["chessboard_gray_value"]]
    if not all(type(shade) is int and 0 <= shade <= 255 for shade in shades):
        raise StartupError(f"{PREPROCESSOR_CONFIG}: the shades of {BOARD} must be whole numbers of 0 to 255.")
    if board["pattern"] != "chessboard" or type(board["chessboard_square_on_top_left"]) is not bool:
        raise StartupError(f'{PREPROCESSOR_CONFIG}: {BOARD} must have the pattern "chessboard", and say how it begins.')
    return {key: board[key] for key in BOARD_RELEASE}
