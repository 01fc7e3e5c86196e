"""The processor's settings, from either spelling of preprocessor_config.json. No torch."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError
from saccade.models.preprocessing import configuration

BICUBIC = 3
NESTED = "media_proc_cfg"
RELEASE: Mapping[str, Any] = {
    "patch_size": 14,
    "merge_size": 2,
    "in_patch_limit": 16_384,
    "patch_limit_on_one_side": 512,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The release's own values, which hold where a file is silent; transformers has the same ones as class defaults."""

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "merge_size": ("merge_kernel_size", "merge_size"),
    "in_patch_limit": ("in_patch_limit", "max_patches"),
    "patch_limit_on_one_side": ("patch_limit_on_one_side", "size"),
}
"""The release's key, then that of transformers; other settings have one name in both."""

FIXED: Mapping[str, Any] = {
    "fixed_output_tokens": None,
    "transparent_bg_config": None,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": BICUBIC,
    "rescale_factor": 1 / 255,
}
"""Settings that have one served value; another one would show the model other pixels than it was trained on."""


def resolve(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that RELEASE names, as the checkpoint's parsed files change them.

    Those of a preprocessor_config.json lie in its `media_proc_cfg` (the release), or else at its top (transformers).
    Raises StartupError where a value is wrong, not served, or another one than the vision tower's in config.json.
    """
    given = preprocessor.get(NESTED, preprocessor)
    if not isinstance(given, Mapping):
        raise StartupError(f"{configuration.PREPROCESSOR_CONFIG}: {NESTED} must be an object, not {given!r}.")
    configuration.check_fixed(given, FIXED)
    settings = {key: _given(given, key) for key in RELEASE}
    for key in ("patch_size", "merge_size", "in_patch_limit", "patch_limit_on_one_side"):
        configuration.whole_number(settings[key], key)
    configuration.one_per_channel(settings["image_mean"], "image_mean")
    configuration.deviations(settings["image_std"], "image_std")
    vision = config.get("vision_config") or {}
    for key, setting in (("patch_size", "patch_size"), ("merge_kernel_size", "merge_size")):
        if _plain(vision.get(key, settings[setting])) != settings[setting]:
            raise StartupError(
                f"config.json says vision_config.{key} is {vision[key]!r}, but {configuration.PREPROCESSOR_CONFIG} cuts"
                f" pictures with {setting} {settings[setting]!r}."
            )
    return settings


def _given(given: Mapping[str, Any], setting: str) -> Any:
    keys = SPELLINGS.get(setting, (setting,))
    return next((_plain(given[key]) for key in keys if given.get(key) is not None), RELEASE[setting])


def _plain(value: Any) -> Any:
    """Return the one number in [n, n] and in {max_height: n, max_width: n}; anything else as it is."""
    match value:
        case [int(rows), int(columns)] if rows == columns:
            return rows
        case {"max_height": int(height), "max_width": int(width)} if height == width:
            return height
        case _:
            return value
