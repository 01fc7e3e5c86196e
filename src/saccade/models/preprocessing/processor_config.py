"""Checks values of a checkpoint's preprocessor_config.json. Each function raises a StartupError that names the key."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from saccade.errors import StartupError
from saccade.protocol.model_files import PREPROCESSOR_CONFIG

CHANNELS = 3
CLIP_COLOURS: Mapping[str, Any] = MappingProxyType(
    {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
)
HALF_COLOURS: Mapping[str, Any] = MappingProxyType({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]})


FIXED: Mapping[str, Any] = MappingProxyType(
    {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
)
"""Settings with one supported value; with another, the model would get other pixels than it was trained on."""


def check_fixed(preprocessor: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise StartupError if a value in *preprocessor* is not the supported one in *fixed*; null counts as absent."""
    for key, value in fixed.items():
        if preprocessor.get(key) is not None and preprocessor[key] != value:
            raise StartupError(f"{PREPROCESSOR_CONFIG}: {key} is {preprocessor[key]!r}; only {value!r} is supported.")


def whole_number(value: object, key: str) -> int:
    """Return *value*, found under *key*, a whole number of at least 1. Raises StartupError."""
    if type(value) is not int or value < 1:
        raise StartupError(f"{PREPROCESSOR_CONFIG}: {key} must be a whole number of at least 1, got {value!r}.")
    return value


def side_of_square(size: object, key: str) -> int:
    """Return the side of a square, found under *key*: a number, two equal ones, or `height` and `width`, equal.

    Raises StartupError.
    """
    entries = {name: one for name, one in size.items() if one is not None} if isinstance(size, Mapping) else size
    match entries:
        case {"height": height, "width": width, **others} if height == width and not others:
            return whole_number(height, key)
        case [height, width] if height == width:
            return whole_number(height, key)
        case int():
            return whole_number(entries, key)
    raise StartupError(
        f"{PREPROCESSOR_CONFIG}: {key} must have equal height and width, and nothing else, not {size!r}."
    )


def colours(preprocessor: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return image_mean and image_std, three numbers each, for pixels from 0 to 1. Raises StartupError."""
    values = {key: preprocessor.get(key) or defaults.get(key) for key in ("image_mean", "image_std")}
    for key, value in values.items():
        numbers = value if isinstance(value, list) else []
        if len(numbers) != CHANNELS or not all(type(number) in (int, float) for number in numbers):
            raise StartupError(f"{PREPROCESSOR_CONFIG}: {key} must be {CHANNELS} numbers, got {value!r}.")
        if key == "image_std" and min(numbers) <= 0:
            raise StartupError(f"{PREPROCESSOR_CONFIG}: {key} must be {CHANNELS} numbers above 0, got {value!r}.")
    return values


def check_tower(vision: Any, settings: Mapping[str, Any], setting_of: Mapping[str, str]) -> None:
    """Raise StartupError if the value of a key of config.json's *vision* tower differs from the setting."""
    for key, setting in setting_of.items():
        if (value := (vision or {}).get(key, settings[setting])) != settings[setting]:
            raise StartupError(
                f"{PREPROCESSOR_CONFIG}: {setting} is {settings[setting]!r}, but in config.json vision_config.{key} is "
                f"{value!r}."
            )
