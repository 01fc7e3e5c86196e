"""Reads values from a checkpoint's config.json. A missing or wrong value raises a StartupError that names its key."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_type_hints

from saccade.errors import StartupError

CONFIG = "config.json"


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under *key*. Raises StartupError."""
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise StartupError(f"{CONFIG}: `{key}` must be an object, not {value!r}.")
    return value


def part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under *key*, or {} if it is null or absent. Raises StartupError."""
    return {} if config.get(key) is None else section(config, key)


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


def flag(config: Mapping[str, Any], key: str) -> bool:
    """Return whether the value under *key* is true; False if there is none."""
    return bool(config.get(key, False))


READERS: Mapping[type, Callable[[Mapping[str, Any], str], Any]] = MappingProxyType(
    {int: integer, float: number, bool: flag}
)


def values_of(kind: type, config: Mapping[str, Any], spellings: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of those fields of the dataclass *kind* that name their key. Raises StartupError.

    A field names its key in its type: `depth: Annotated[int, "num_hidden_layers"]`. *spellings* maps keys to other
    names; such a name is read if *config* has it, or lacks the key.
    """
    others = {key: other for key, other in (spellings or {}).items() if other in config or key not in config}
    hints = get_type_hints(kind, include_extras=True).items()
    keys = {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints if hasattr(hint, "__metadata__")}
    return {name: READERS[type_](config, others.get(key, key)) for name, (type_, key) in keys.items()}


def check_equal(config: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raise StartupError if *config* has a key of *supported* with another value."""
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise StartupError(f"{CONFIG}: `{key}` is {config[key]!r}; this network knows {value!r}.")
