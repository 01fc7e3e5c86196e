"""Computes an image's size, tokens and text from its dimensions. Runs in the gateway, without torch.

Source of the rules: transformers 5.23, models/pixtral/image_processing_pixtral.py and processing_pixtral.py.
"""

from collections.abc import Mapping
from typing import Any

from saccade.errors import ImageTooLarge, StartupError
from saccade.models.backbones.model_config import integer
from saccade.models.preprocessing import smart_resize
from saccade.models.preprocessing.own_wire import FixedSizeLayout
from saccade.models.preprocessing.processor_config import (
    CHANNELS,
    CLIP_COLOURS,
    check_fixed,
    check_tower,
    colours,
    whole_number,
)
from saccade.protocol.media import ImageLayout
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

BREAK, END = "[IMG_BREAK]", "[IMG_END]"
DEFAULT_MERGE = 2
DEFAULTS: Mapping[str, Any] = {"patch_size": 16, "size": {"longest_edge": 1024}}
"""The defaults of the reference processor for missing keys: transformers 5.23, PixtralImageProcessor."""

LOW_DETAIL_EDGE = 512
"""The longest edge with `detail: low`: OpenAI's size for it."""


class Layout(FixedSizeLayout):
    """The layout of an image that keeps its size up to a longest edge. Text ends each row of its tokens."""

    def __init__(self, config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> None:
        check_fixed(preprocessor, {**smart_resize.FIXED, "do_center_crop": False})
        options = {**DEFAULTS, **{key: value for key, value in preprocessor.items() if value is not None}}
        self.settings: Mapping[str, Any] = {
            "patch_size": _number(options, "patch_size", ("height", "width")),
            "merge_size": merge_size(config),
            "longest_edge": _number(options, "size", ("longest_edge",)),
            **colours(options, CLIP_COLOURS),
        }
        check_tower(config.get("vision_config"), self.settings, {"patch_size": "patch_size"})

    def low_detail(self) -> Mapping[str, Any]:
        """Return a longest edge of at most LOW_DETAIL_EDGE."""
        return {"longest_edge": min(LOW_DETAIL_EDGE, self.settings["longest_edge"])}

    def image(self, width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
        """Return grid (1, rows, columns), tokens, patch shape, and the text after each row. Raises ImageTooLarge."""
        return image_layout(width, height, settings)


def image_layout(width: int, height: int, settings: Mapping[str, Any]) -> ImageLayout:
    """Return the layout of an upright image: shrunk to the longest edge, then sides rounded up to whole tokens."""
    merge, edge = settings["merge_size"], settings["longest_edge"]
    token = settings["patch_size"] * merge
    shrink = max(1.0, height / edge, width / edge)
    rows, columns = (-(-int(side / shrink) // token) for side in (height, width))
    if not rows or not columns:
        raise ImageTooLarge(
            f"The image has {width} x {height} pixels; its long side may be at most {edge} times its short one."
        )
    return ImageLayout(
        resized_height=rows * token,
        resized_width=columns * token,
        grid=(1, rows * merge, columns * merge),
        num_tokens=rows * columns,
        pixel_shape=(rows * columns * merge**2, CHANNELS * settings["patch_size"] ** 2),
        prompt=(*((columns, BREAK) * rows)[:-1], END),
    )


def merge_size(config: Mapping[str, Any]) -> int:
    """Return how many patches in each direction become one token. Raises StartupError."""
    return integer({"spatial_merge_size": DEFAULT_MERGE, **config}, "spatial_merge_size")


def _number(options: Mapping[str, Any], key: str, names: tuple[str, ...]) -> int:
    """Return the number under *key*, alone or in an object that has it under all of *names*. Raises StartupError."""
    value = options[key]
    entries = {name: one for name, one in value.items() if one is not None} if isinstance(value, Mapping) else {}
    if isinstance(value, Mapping) and (set(entries) != set(names) or len(set(entries.values())) != 1):
        raise StartupError(f"{PREPROCESSOR_CONFIG}: {key} must have only {' and '.join(names)}, equal, not {value!r}.")
    return whole_number(entries[names[0]] if entries else value, key)
