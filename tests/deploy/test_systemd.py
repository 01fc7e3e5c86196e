"""The units' flags are Saccade's, processes have time to drain, and confined decode processes survive the hardening.

The gateway's filter of system calls was compared by hand with what a gateway and its decode processes call (strace).
"""

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from saccade.cli.main import make_app
from saccade.fleet.address import check_url
from saccade.transport import shared_memory

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "systemd"
PROGRAM = "/opt/saccade/bin/saccade"
UNITS = ("saccade-worker@.service", "saccade-gateway.service")
LANDLOCK = {"landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"}


def service(name: str) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(FOLDER / name)
    return unit["Service"]


def arguments(name: str) -> dict[str, Any]:
    """What our program makes of the unit's command for instance 0; the settings file is an operator's own."""
    words = shlex.split(service(name)["ExecStart"].replace("%i", "0").replace("${MODEL}", "/models/model"))
    assert words[0] == PROGRAM
    if "--config" in words:
        del words[words.index("--config") : words.index("--config") + 2]
    _, bound, _ = make_app(None).parse_args(words[1:], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def test_units_pass_systemds_own_check(tmp_path: Path) -> None:
    """Where systemd is not installed, the other tests have to do."""
    if shutil.which("systemd-analyze") is None:
        return
    for name in (*UNITS, "saccade.target"):
        unit = (FOLDER / name).read_text().replace(PROGRAM, sys.executable)
        (tmp_path / name).write_text(unit)
    command = ["systemd-analyze", "--man=no", "--recursive-errors=no", "verify", *map(str, tmp_path.iterdir())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_have_time_to_drain() -> None:
    worker, gateway = (service(name) for name in UNITS)
    assert int(worker["TimeoutStopSec"]) > arguments(UNITS[0])["shutdown_timeout"]
    assert int(gateway["TimeoutStopSec"]) > arguments(UNITS[1])["server"].shutdown_timeout_seconds
    assert worker["KillMode"] == gateway["KillMode"] == "mixed"


def test_the_kernel_ends_one_process_for_memory_and_no_other_goes_with_it() -> None:
    assert [service(name)["OOMPolicy"] for name in UNITS] == ["continue"] * 2


def test_gateway_and_workers_reach_each_other() -> None:
    worker, gateway = (service(name) for name in UNITS)
    assert worker["User"] == gateway["User"] == (FOLDER / "saccade.sysusers").read_text().splitlines()[-1].split()[1]
    socket = arguments(UNITS[0])["access"].uds
    assert str(socket.parent) == f"/run/{worker['RuntimeDirectory']}".replace("%i", "0")
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert f"unix:{socket}" in page  # in the example of workers.txt
    check_url(f"unix:{socket}")
    assert "CUDA_VISIBLE_DEVICES=%i" in worker["Environment"]
    # A private /dev would have no GPU; /dev/shm stays the host's in either.
    assert "PrivateDevices" not in worker
    assert Path("/dev/shm") == shared_memory.FOLDER
    assert "PrivateIPC" not in gateway


def test_hardening_lets_decode_processes_confine_themselves() -> None:
    gateway = service(UNITS[1])
    assert gateway["NoNewPrivileges"] == "yes"
    allowed = set(gateway["SystemCallFilter"].split())
    assert allowed >= LANDLOCK | {"@system-service"}
    for unit in map(service, UNITS):
        assert "MemoryDenyWriteExecute" not in unit  # numba, Triton and ctypes make code
