"""Declares settings, reads them from sources other than flags, and passes them from a parent to a child process.

A setting is a field of a dataclass that cyclopts reads. Its flag, environment variable and help come from its
annotation, its default and the text below it.

A flag overrides its environment variable, the variable overrides the settings file, and the file overrides the default.
`--max-model-len` is SACCADE_MAX_MODEL_LEN in the environment and `max-model-len` in the file.
"""

import dataclasses
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import yaml
from cyclopts import Parameter, Token
from cyclopts.config import Dict, Env
from cyclopts.validators import Number

from saccade.errors import StartupError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PREFIX = "SACCADE_"
VLLM_API_KEY = "VLLM_API_KEY"
"""Holds a key if SACCADE_API_KEY does not."""

MIB, GIB = 1 << 20, 1 << 30
_PLACE = re.compile(r"\(at line (\d+), column \d+\)$")
_QUANTITY = re.compile(r"(\d{1,18})(\.\d{1,18})?([kKmMgGtT])(i?)")

FLAT = Parameter(name="*")
"""Decorates a dataclass whose fields are flags without its own name before theirs."""

NO_FLAG = Parameter(parse=False)
"""Marks a setting that only code changes."""


Port = Annotated[int, Parameter(validator=Number(gte=1, lte=65535))]
Seconds = Annotated[float, Parameter(validator=Number(gt=0))]
NotNegative = Annotated[float, Parameter(validator=Number(gte=0))]
Switch = Annotated[bool, Parameter(negative="")]
Many = Annotated[tuple[str, ...], Parameter(negative="", show_default=False)]
Translate = Callable[[str, object], Mapping[str, object]]
"""Returns the settings that stand for a name and its value in a settings file, none if they have no effect."""


def _absolute(_: Any, tokens: Sequence[Token]) -> Path:
    return Path(tokens[0].value).expanduser().absolute()


def _quantity(_: Any, tokens: Sequence[Token]) -> int:
    """Return a whole number as vLLM's human_readable_int reads it: 32k is 32000, 32K is 32768, 1.5k is 1500.

    As in Kubernetes, it may also have a unit such as Gi: 1.5Gi is 1.5 times 1024 cubed.
    """
    number = tokens[0].value.strip()
    if match := _QUANTITY.fullmatch(number):
        whole, decimals, unit, binary = match.groups(default="")
        if decimals and unit.isupper() and not binary:
            raise ValueError(
                f"{unit} takes no decimals: write {whole}{decimals}{unit.lower()} or {whole}{decimals}{unit}i"
            )
        scale: int = (1000 if unit.islower() and not binary else 1024) ** ("kmgt".index(unit.lower()) + 1)
        return int(Fraction(whole + decimals) * scale)
    try:
        return int(number)
    except ValueError as error:
        raise ValueError("must be a whole number, such as 32768, 32k (32000) or 32K (32768)") from error


def _json_object(_: Any, tokens: Sequence[Token]) -> str:
    try:
        if isinstance(value := json.loads(tokens[0].value), dict):
            return json.dumps(value)
    except (ValueError, RecursionError):
        pass
    raise ValueError('must be a JSON object, such as {"name": 1}')


Count = Annotated[int, Parameter(validator=Number(gte=1), converter=_quantity)]
Size = Annotated[int, Parameter(validator=Number(gte=0), converter=_quantity)]
JsonObject = Annotated[str, Parameter(converter=_json_object, metavar="JSON")]
LocalPath = Annotated[Path, Parameter(converter=_absolute)]


def _as_given(name: str, value: object) -> Mapping[str, object]:
    return {name: value}


def sources(file: Path | None, translate: Translate = _as_given) -> tuple[Any, ...]:
    """Return the sources in which cyclopts looks for settings that are not given as flags.

    *translate* returns the names and values for each setting in *file*; objects with the same name are merged.

    Raises StartupError if *file* is missing, unreadable or malformed, or if a SACCADE_ variable or VLLM_API_KEY is set
    but empty. If a secret has no value, SACCADE_API_KEY is empty; that must not start a server without keys.
    """
    for name, value in os.environ.items():
        if (name.startswith(PREFIX) or name == VLLM_API_KEY) and not value.strip():
            raise StartupError(f"{name} is set but empty; set it to a value or unset it.")
    environment = Env(PREFIX, command=False)
    if file is None:
        return (environment,)
    if not file.is_file():
        raise StartupError(f"There is no settings file {file}.")
    is_yaml = file.suffix in (".yaml", ".yml")
    language, example = ("YAML", "max-model-len: 4096") if is_yaml else ("TOML", "max-model-len = 4096")
    try:
        content = (_parse_yaml if is_yaml else parse_toml)(file.read_bytes())
    except OSError as error:
        raise StartupError(f"Cannot read the settings file {file}: {error.strerror}.") from error
    except StartupError as error:
        advice = "" if is_yaml else " If it is YAML, let its name end in .yaml."
        raise StartupError(
            f"The settings file {file} must be {language}, with lines such as `{example}`. {error.message}{advice}"
        ) from error
    translated: dict[str, object] = {}
    for setting in content.items():
        for ours, meant in translate(*setting).items():
            own = translated.get(ours)
            translated[ours] = {**own, **meant} if isinstance(own, dict) and isinstance(meant, dict) else meant
    # A flag with keys takes them as JSON.
    settings = {ours: json.dumps(meant) if isinstance(meant, dict) else meant for ours, meant in translated.items()}
    return (environment, Dict(settings, source=str(file.absolute()), use_commands_as_keys=False))


def _parse_yaml(content: bytes) -> dict[str, Any]:
    """Return the mapping in *content*, without names whose value is null.

    Raises StartupError, which names the line if it is known.
    """
    try:
        settings = yaml.safe_load(content)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise StartupError(f"It is not YAML: look at line {mark.line + 1 if mark else 1}.") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise StartupError("It has a character or a value that YAML does not allow.") from error
    if not isinstance(settings, dict | None):
        raise StartupError("It is not a mapping of names to values: look at line 1.")
    return {str(name): value for name, value in (settings or {}).items() if value is not None}


def parse_toml(content: bytes) -> dict[str, Any]:
    """Return the tables in *content*. Raises StartupError, which names the line of a syntax error."""
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


def program(*words: str, settings: Iterable["DataclassInstance"] = ()) -> tuple[list[str], dict[str, str]]:
    """Return a command that runs `saccade` with *words* and *settings* as a child process, and its environment.

    A child gets all settings from its parent, so the environment omits this process's SACCADE_ variables and
    VLLM_API_KEY. Secret settings, which repr() omits, go into the environment: other users can read a command line, but
    not an environment.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(PREFIX) and name != VLLM_API_KEY
    }
    command = [sys.executable, "-m", "saccade.cli.main", *words]
    for flags in settings:
        command += to_arguments(flags)
        environment |= {
            _variable(name): value if isinstance(value, str) else " ".join(value)
            for name, value, at in flags_of(flags)
            if not at.repr and value
        }
    return command, environment


def to_arguments(flags: "DataclassInstance", left_out: Sequence[str] = ()) -> list[str]:
    """Return *flags* as command-line arguments, except flags at their default, secret flags and those in *left_out*."""
    arguments: list[str] = []
    for name, value, field in flags_of(flags):
        if value == field.default or name in left_out or not field.repr:
            continue
        if isinstance(value, bool):
            arguments.append(name if value else f"--no-{name.removeprefix('--')}")
        else:
            for one in value if isinstance(value, tuple) else (value,):
                arguments += [name, str(one)]
    return arguments


def _variable(flag: str) -> str:
    return PREFIX + flag.removeprefix("--").replace("-", "_").upper()


def flags_of(settings: "DataclassInstance") -> Iterator[tuple[str, Any, "dataclasses.Field[Any]"]]:
    """Yield every flag in *settings* and in the dataclasses nested in it, as its name, value and field."""
    hints = get_type_hints(type(settings), include_extras=True)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        parameters = [one for one in getattr(hints[field.name], "__metadata__", ()) if isinstance(one, Parameter)]
        if getattr(type(value), "__cyclopts__", None) is not None:
            yield from flags_of(value)
        elif NO_FLAG not in parameters:
            names = [name for one in parameters for name in one.name or ()]
            yield names[0] if names else f"--{field.name.replace('_', '-')}", value, field
