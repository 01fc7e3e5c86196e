"""Read values from a checkpoint's config.json; a missing or wrong value raises StartupError, which names its key."""

from collections.abc import Mapping
from typing import Any

from saccade.errors import StartupError

CONFIG = "config.json"
TIED = "tie_word_embeddings"


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under *key*. Raises StartupError."""
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise StartupError(f"{CONFIG}: `{key}` must be an object, not {value!r}.")
    return value


def integer(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    """Return the whole number under *key*, at least *least*. Raises StartupError."""
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise StartupError(f"{CONFIG}: `{key}` must be a whole number of at least {least}, not {value!r}.")
    return value


def number(config: Mapping[str, Any], key: str) -> float:
    """Return the positive number under *key*. Raises StartupError."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise StartupError(f"{CONFIG}: `{key}` must be a positive number, not {value!r}.")
    return float(value)


def choice(config: Mapping[str, Any], key: str, supported: tuple[str, ...]) -> str:
    """Return the word under *key*, which must be one of *supported*. Raises StartupError."""
    value = config.get(key)
    if value not in supported:
        raise StartupError(f"{CONFIG}: `{key}` is {value!r}; this network knows {', '.join(supported)}.")
    return str(value)


def ties_embeddings(config: Mapping[str, Any]) -> bool:
    """Return whether the embedding is also the matrix of the logits. If the top level has the key, it decides."""
    text = config.get("text_config")
    within = text.get(TIED) if isinstance(text, Mapping) else False
    return bool(config.get(TIED, within))
