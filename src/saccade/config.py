"""Where settings come from besides flags, and how a parent passes its settings to a child process.

A flag overrides its environment variable, the variable overrides the settings file, and the file overrides the default.
`--max-model-len` is SACCADE_MAX_MODEL_LEN in the environment and `max-model-len` in the file.
"""

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts.config import Dict, Env

from saccade.errors import StartupError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PREFIX = "SACCADE_"
_PLACE = re.compile(r"\(at line (\d+), column \d+\)$")


def sources(file: Path | None) -> tuple[Any, ...]:
    """Return the sources in which cyclopts looks for settings that are not given as flags.

    Raises StartupError if *file* is missing or not TOML, or a variable is empty: an empty SACCADE_API_KEY, from a
    secret without a value, must not start a server without keys.
    """
    for name, value in os.environ.items():
        if name.startswith(PREFIX) and not value.strip():
            raise StartupError(f"{name} is set but empty; set it to a value or unset it.")
    environment = Env(PREFIX, command=False)
    if file is None:
        return (environment,)
    if not file.is_file():
        raise StartupError(f"There is no settings file {file}.")
    try:
        settings = parse_toml(file.read_bytes())
    except OSError as error:
        raise StartupError(f"Cannot read the settings file {file}: {error.strerror}.") from error
    except StartupError as error:
        raise StartupError(
            f"The settings file {file} must be TOML, with lines such as `max-model-len = 4096`. {error.message}"
        ) from error
    return (environment, Dict(settings, source=str(file.absolute()), use_commands_as_keys=False))


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the tables in *content*. Raises StartupError that names the line."""
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise StartupError("It is not text in UTF-8.") from error
    except tomllib.TOMLDecodeError as error:
        place = _PLACE.search(str(error))
        line = int(place[1]) if place else len(content.splitlines())  # else the end is missing
        raise StartupError(f"It is not TOML: look at line {line}.") from error
    except (RecursionError, ValueError) as error:
        raise StartupError("It has a value that is nested too deeply, or a number of too many digits.") from error


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return *environment* without Saccade's variables, for a child process that gets all settings from its parent."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}


def to_arguments(flags: "DataclassInstance", secret: Sequence[str] = ()) -> list[str]:
    """Return *flags* as command-line arguments, without flags at their default and without *secret* ones."""
    arguments: list[str] = []
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if value == field.default or field.name in secret:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            for one in value if isinstance(value, tuple) else (value,):
                arguments += [f"--{name}", str(one)]
    return arguments


def to_environment(flags: "DataclassInstance", secret: Sequence[str]) -> dict[str, str]:
    """Return the *secret* flags as environment variables, which other users of the machine cannot read."""
    values_by_name = {name: getattr(flags, name) for name in secret}
    return {PREFIX + name.upper(): " ".join(values) for name, values in values_by_name.items() if values}
