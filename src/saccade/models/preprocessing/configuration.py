"""Reading a checkpoint's preprocessor_config.json: a missing or wrong key is the operator's to know."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError

PREPROCESSOR_CONFIG = "preprocessor_config.json"
CHANNELS = 3


def check_fixed(preprocessor: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise StartupError where *preprocessor* has another value than *fixed*, the one served; null counts as silent."""
    for key, value in fixed.items():
        if preprocessor.get(key) is not None and preprocessor[key] != value:
            raise StartupError(f"{PREPROCESSOR_CONFIG} sets {key} to {preprocessor[key]!r}; only {value!r} is served.")


def whole_number(value: object, key: str) -> int:
    """Return *value*, found under *key*, a whole number of at least 1. Raises StartupError."""
    if type(value) is not int or value < 1:
        raise StartupError(f"{PREPROCESSOR_CONFIG} gives no usable {key}: {value!r} is not a positive whole number.")
    return value


def one_per_channel(value: object, key: str) -> list[float]:
    """Return *value*, found under *key*: three numbers, of pixels in 0 to 1. Raises StartupError."""
    numbers = value if isinstance(value, list) else []
    if len(numbers) != CHANNELS or not all(type(number) in (int, float) for number in numbers):
        raise StartupError(f"{PREPROCESSOR_CONFIG} gives no usable {key}: {value!r} are not {CHANNELS} numbers.")
    return numbers


def deviations(value: object, key: str) -> list[float]:
    """Return *value*, found under *key*: three numbers above zero, to divide by. Raises StartupError."""
    numbers = one_per_channel(value, key)
    if min(numbers) <= 0:
        raise StartupError(f"{PREPROCESSOR_CONFIG} gives no usable {key}: {value!r} are not all above zero.")
    return numbers
