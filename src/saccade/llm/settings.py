"""Reads settings by name. The command line's parser checks them, so their names and rules are those of the flags."""

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cyclopts import App, CycloptsError

from saccade import config
from saccade.engine.config import EngineSettings
from saccade.errors import StartupError
from saccade.gateway.config import MediaSettings, ServerSettings

PARSERS = ("tool_call_parser", "reasoning_parser")
"""Settings of the server that an LLM has, too."""

ENGINE, MEDIA, SERVER = EngineSettings(), MediaSettings(), ServerSettings()
_FLAG = re.compile(r"--(no-)?([a-z][a-z0-9-]*)")


class Settings(NamedTuple):
    """All settings for an engine, for its images, and for its server, if it has one."""

    engine: EngineSettings
    media: MediaSettings
    server: ServerSettings


def read_settings(values: Mapping[str, Any], *, has_server: bool = False) -> Settings:
    """Return *values* as settings; `max_model_len` follows the rules of `--max-model-len`.

        read_settings({"max_model_len": 4096, "limit_mm_per_prompt": {"image": 4}})

    None stands for the default, and a list for a flag that is given more than once. Without a server, PARSERS are the
    only server settings. Raises StartupError, which names the setting, and suggests one if an unknown name is close.
    """
    app = App(help_flags=(), version_flags=(), result_action="return_value")
    kinds = (ENGINE, MEDIA, SERVER) if has_server else (ENGINE, MEDIA)
    names = {_name(flag) for settings in kinds for flag, _, _ in config.flags_of(settings)}.union(PARSERS)
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else "docs/configuration.md lists the flags with these names."
            raise StartupError(f"There is no setting {name}; {hint}")

    @app.default
    def read(
        *, engine: EngineSettings = ENGINE, media: MediaSettings = MEDIA, server: ServerSettings = SERVER
    ) -> Settings:
        return Settings(engine, media, server)

    words = [word for name, value in values.items() for word in _words(name, value)]
    try:
        settings: Settings = app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise StartupError(_FLAG.sub(lambda flag: _name(flag[0]), str(error))) from error
    return settings


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _words(name: str, value: object) -> list[str]:
    """Return the command-line arguments that set *name* to *value*."""
    if value is None:
        return []
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, list | tuple):
        return [f"{flag}={one}" for one in value]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict | bool) else value}"]
