"""docs/configuration.md and the flags say the same."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from saccade.cli.flags import EngineFlags, MediaFlags, ServerFlags
from saccade.cli.gateway import RoutingFlags
from saccade.gateway.config import GatewayConfig
from saccade.gateway.workers.settings import DispatchLimits
from saccade.media.header import MediaLimits

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "million": 10**6}
WORDS: dict[str, Any] = {
    "none": (),
    "every public host": (),
    "the folder's last part, or the hub id": (),
    "on": True,
    "off": False,
    "up to 4, one a core": MediaFlags.decode_processes,
    "an eighth of the memory, 256 MiB to 4 GiB": ServerFlags.max_request_memory,
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
        ("Server", ServerFlags, {"worker-url", "model"}),
        ("Routing", RoutingFlags, set()),
        ("Images", MediaFlags, set()),
        ("Engine", EngineFlags, set()),
    ],
)
def test_page_lists_every_flag_with_its_default(section: str, flags: Any, others: set[str]) -> None:
    page = documented(section)
    fields = {field.name.replace("_", "-"): field.default for field in dataclasses.fields(flags)}
    assert set(page) == set(fields) | others
    for name, default in fields.items():
        if default is None:
            assert page[name], name  # words say what holds instead
        else:
            assert value(page[name], type(default)) == default, name


def test_routing_flags_set_the_gateway() -> None:
    assert RoutingFlags().applied(GatewayConfig()) == GatewayConfig()
    flags = RoutingFlags("cost", 0.5, 1 << 20, False, 2, 3, 4, 5.0)
    assert flags.applied(GatewayConfig()) == GatewayConfig(
        routing_policy="cost",
        routing_temperature=0.5,
        routing_index_bytes=1 << 20,
        assumes_holdings=False,
        dispatch=DispatchLimits(worker_queue=3, max_waiting=4, wait_seconds=5.0, max_retries=2),
    )
