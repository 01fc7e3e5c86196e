"""A process that is killed at any moment loses nothing that it has acknowledged."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.gateway.state.rows import FILE, RESPONSE
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.state import State

PROGRAM = Path(__file__).with_name("storing_process.py")
KINDS = {"file": FILE, "response": RESPONSE}


def kill_one(location: str, key_file: Path, seconds: float) -> list[list[str]]:
    """Kill a process that stores, *seconds* after it has begun, and return what it has acknowledged."""
    process = subprocess.Popen([sys.executable, PROGRAM, location, str(key_file)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    *whole, _ = (first + process.stdout.read()).decode().split("\n")
    process.stdout.close()
    process.wait()
    return [line.split() for line in whole]


async def check(location: str, key_file: Path, acknowledged: list[list[str]]) -> None:
    """Check that everything is there, whole, and that nobody else's is."""
    state = State.of_settings(StateSettings(location, key_file), tenant_files=10_000)
    assert state is not None
    await state.start()
    deleted = {tuple(line[1:]) for line in acknowledged if line[0] == "deleted"}
    # The last deletion may have been made without being acknowledged.
    _, *names = [line[2] for line in acknowledged if line[:2] == ["file", "one"]][::-1] or [""]
    for what, tenant, name in acknowledged:
        if what == "deleted":
            assert await state.items.find(tenant.encode(), FILE, name) is None
            continue
        found = await state.items.find(tenant.encode(), KINDS[what], name)
        if (tenant, name) in deleted and what == "file":
            continue
        if found is None:
            assert (what, tenant) == ("file", "one")
            assert name == names[0]
            continue
        head, body = found
        assert head == tenant.encode()
        assert body in (name.encode(), name.encode() * 20_000)
        assert await state.items.find(b"three", KINDS[what], name) is None
    await state.close()


@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.ci)])
def test_nothing_acknowledged_is_lost(num_kills: int, new_location: Callable[[], str], tmp_path: Path) -> None:  # F20
    location, key_file = new_location(), tmp_path / "key"
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(num_kills):
        acknowledged = kill_one(location, key_file, moments.uniform(0, 0.15))
        assert acknowledged
        asyncio.run(check(location, key_file, acknowledged))
