"""docs/configuration.md and the flags say the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from saccade.cli.main import make_app
from saccade.config import flags_of
from saccade.engine.config import EngineSettings
from saccade.fleet.settings import RoutingSettings
from saccade.gateway.config import MediaSettings, ServerSettings
from saccade.media.header import MediaLimits

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "million": 10**6}
WORDS: dict[str, Any] = {
    "none": (),
    "every public host": (),
    "the hub id, or the folder's last part": (),
    "on": True,
    "off": False,
    "up to 4, one a core": MediaSettings.num_decode_processes,
    "an eighth of the memory, 256 MiB to 4 GiB": ServerSettings.max_request_memory_bytes,
}


def documented(section: str) -> dict[str, str]:
    """The flags of the tables under *section*, each with its default as it is written."""
    text = PAGE.read_text().partition(f"## {section} (")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `--([a-z-]+)` \| (.*?) \|", text, re.MULTILINE))


def value(written: str, kind: type) -> object:
    """The value that a default in the page stands for."""
    if written in WORDS:
        return WORDS[written]
    if written.startswith("`{"):
        limits = json.loads(written.strip("`"))
        return MediaLimits(limits["image"], limits["video"])
    number, _, unit = written.partition(" ")
    return int(number) * UNITS[unit] if unit else kind(written)


@pytest.mark.parametrize(
    ("section", "flags", "others"),
    [
        ("Server", ServerSettings, {"worker-url", "model"}),
        ("Routing", RoutingSettings, set()),
        ("Images", MediaSettings, set()),
        ("Engine", EngineSettings, set()),
    ],
)
def test_page_lists_every_flag_with_its_default(section: str, flags: Any, others: set[str]) -> None:
    page = documented(section)
    fields = {name.removeprefix("--"): field.default for name, _, field in flags_of(flags())}
    assert set(page) == set(fields) | others
    for name, default in fields.items():
        if default is None:
            assert page[name], name  # words say what holds instead
        else:
            assert value(page[name], type(default)) == default, name


def test_page_names_flags_of_commands_that_have_them() -> None:
    """Rows such as "`--url` of `ask`", and "`--host`, `--port` of `worker`"."""
    app = make_app(None)
    section = PAGE.read_text().partition("## Flags of single commands")[2]
    rows = re.findall(r"^\| (`--.*?)(?: \||,? or )", section, re.MULTILINE)
    places = [row.partition(" of ") for row in rows if " of `" in row]
    assert len(places) > 40
    for names, _, commands in places:
        for command in re.findall(r"`(\w+)`", commands):
            flags = {name for argument in app[command].assemble_argument_collection() for name in argument.names}
            assert set(re.findall(r"--[a-z-]+", names)) <= flags, (command, names)
