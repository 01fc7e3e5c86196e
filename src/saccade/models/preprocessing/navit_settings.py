"""Reads the settings of Kimi's processors from the releases' or transformers' form of preprocessor_config.json.

Does not import torch.
"""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.preprocessing import processor_config, smart_resize
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

NESTED = "media_proc_cfg"
RELEASE: Mapping[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "in_patch_limit": 16_384,
    "patch_limit_on_one_side": 512,
    **processor_config.HALF_COLOURS,
}
"""Kimi-K2.5's values, which apply to missing keys; transformers has the same values as class defaults."""

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "merge_size": ("merge_kernel_size", "merge_size"),
    "in_patch_limit": ("in_patch_limit", "max_patches"),
    "patch_limit_on_one_side": ("patch_limit_on_one_side", "size"),
}
"""The release's key, then that of transformers; other settings have the same name in both."""

FIXED: Mapping[str, Any] = {
    "fixed_output_tokens": None,
    "transparent_bg_config": None,
    **smart_resize.FIXED,
}
"""Settings with one supported value; with another, the model would get other pixels than it was trained on."""


def resolve(
    config: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    release: Mapping[str, Any] = RELEASE,
    fixed: Mapping[str, Any] = FIXED,
) -> dict[str, Any]:
    """Return the settings of *release* with the checkpoint's values; those in *fixed* support only one value.

    preprocessor_config.json has them in `media_proc_cfg` (the release) or at its top level (transformers). Raises
    StartupError if a value is wrong, not supported, or different from that of config.json's vision tower.
    """
    options = preprocessor.get(NESTED, preprocessor)
    if not isinstance(options, Mapping):
        raise StartupError(f"{PREPROCESSOR_CONFIG}: {NESTED} must be an object, not {options!r}.")
    processor_config.check_fixed(options, fixed)
    settings = {key: _setting(options, key, release) for key in release}
    for key in ("patch_size", "merge_size", "in_patch_limit", "patch_limit_on_one_side"):
        processor_config.whole_number(settings[key], key)
    vision = {key: _plain(value) for key, value in (config.get("vision_config") or {}).items()}
    processor_config.check_tower(vision, settings, {"patch_size": "patch_size", "merge_kernel_size": "merge_size"})
    return settings | processor_config.colours(settings)


def _setting(options: Mapping[str, Any], setting: str, release: Mapping[str, Any]) -> Any:
    keys = SPELLINGS.get(setting, (setting,))
    return next((_plain(options[key]) for key in keys if options.get(key) is not None), release[setting])


def _plain(value: Any) -> Any:
    """Return n for [n, n] and for {max_height: n, max_width: n}; any other value unchanged."""
    match value:
        case [int(rows), int(columns)] if rows == columns:
            return rows
        case {"max_height": int(height), "max_width": int(width)} if height == width:
            return height
        case _:
            return value
