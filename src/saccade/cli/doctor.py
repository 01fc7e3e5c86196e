"""`saccade doctor`: check this machine, a model's folder, or a running fleet."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from cyclopts import Group, Parameter
from rich.text import Text

from saccade.cli import exit_codes
from saccade.cli.admin_port import require_key
from saccade.cli.fleet_checks import check_fleet, reports_of_gateway, reports_of_workers
from saccade.cli.machine_checks import Finding, State, check_machine, check_model
from saccade.cli.worker_access import WORKER_ACCESS, WorkerAccess
from saccade.config import Many, Port, Switch
from saccade.consoles import new_console
from saccade.log_setup import log_warnings

COLOURS: dict[State, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@Parameter(name="*", group=Group("A running fleet", sort_key=1))
@dataclass(frozen=True)
class FleetFlags:
    """The fleet to check in place of this machine."""

    gateway: str | None = None
    "The admin port of a running gateway, as http://127.0.0.1:PORT."
    admin_key: str | None = None
    "A key of the admin port. Prefer SACCADE_ADMIN_KEY, which `ps` does not show."
    worker_url: Many = ()
    "A worker, as for `saccade gateway`; may be given many times."
    worker_access: WorkerAccess = WORKER_ACCESS


FLEET = FleetFlags()


def doctor(
    model: Path | None = None,
    /,
    *,
    port: Port = 8000,
    fleet: FleetFlags = FLEET,
    json: Switch = False,
) -> int:
    """Check this machine, a model's folder, or a running fleet. The exit code is 1 if a check failed.

    Parameters
    ----------
    model
        A folder in hub layout, whose files are checked too.
    port
        The port on which a gateway shall listen.
    json
        Print the findings as JSON.
    """
    log_warnings()
    findings = asyncio.run(_findings(model, port, fleet))
    if json:
        print(msgspec.json.format(msgspec.json.encode({"findings": findings})).decode())
    else:
        _show(findings)
    return exit_codes.ERROR if any(finding.state == "failed" for finding in findings) else 0


async def _findings(model: Path | None, port: int, fleet: FleetFlags) -> list[Finding]:
    if fleet.gateway is None and not fleet.worker_url:
        return [*check_machine(port), *([] if model is None else [check_model(model)])]
    if fleet.gateway is None:
        reports = await reports_of_workers(fleet.worker_url, fleet.worker_access.credentials(fleet.worker_url))
    else:
        reports = reports_of_gateway(fleet.gateway, require_key(fleet.admin_key))
    return [finding async for finding in check_fleet(reports)]


def _show(findings: Sequence[Finding]) -> None:
    """Print a line for each of *findings*, and how many there are of each state."""
    console = new_console(soft_wrap=True)
    for one in findings:
        sentence = f"{one.name}: {one.detail}".rstrip(".") + (f". {one.fix}" if one.fix else "")
        console.print(Text.assemble((f"{one.state:<9}", COLOURS[one.state]), sentence))
    states = Counter(finding.state for finding in findings)
    print(", ".join(f"{states[state]} {state}" for state in COLOURS))
