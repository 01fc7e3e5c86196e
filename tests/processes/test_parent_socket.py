"""A worker that is tied to its parent by a socket: it reports its address or its fault, and ends with the parent."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import wait_until

from saccade import config
from saccade.processes.parent_socket import Failed, Serving, read_report, start_tied

TOKEN = "a-token-of-a-test-of-workers"


@pytest.fixture
def flags(tmp_path: Path) -> tuple[str, ...]:
    """The flags of a worker of the bundled model at any free port."""
    path = tmp_path / "worker.token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return (
        *("--host", "127.0.0.1", "--port", "0", "--worker-token-file", str(path), "--threads", "1"),
        *("--no-summary", "--log-level", "WARNING", "--shutdown-timeout", "0"),
    )


async def start(*words: str) -> tuple[subprocess.Popen[bytes], asyncio.StreamReader, asyncio.StreamWriter]:
    command, environment = config.program("worker", *words)
    process, ours = start_tied(command, environment)
    return process, *await asyncio.open_connection(sock=ours)


async def test_worker_reports_its_port_and_ends_when_the_socket_closes(flags: tuple[str, ...]) -> None:  # F11
    process, reader, writer = await start(*flags)
    try:
        report = await read_report(reader)
        assert isinstance(report, Serving)
        address, _, port = report.url.rpartition(":")
        assert address == "grpc://127.0.0.1"
        assert int(port) > 0
        writer.close()
        await asyncio.to_thread(wait_until, lambda: process.poll() is not None)
        assert process.returncode == 0
    finally:
        process.kill()


async def test_worker_reports_why_it_cannot_start(flags: tuple[str, ...], tmp_path: Path) -> None:
    process, reader, writer = await start(str(tmp_path / "missing"), *flags)
    report = await read_report(reader)
    assert isinstance(report, Failed)
    assert "missing" in report.sentence
    assert await read_report(reader) is None
    assert await asyncio.to_thread(process.wait) == 1
    writer.close()


async def test_worker_that_is_killed_before_it_serves_has_no_report(flags: tuple[str, ...]) -> None:
    process, reader, writer = await start(*flags)
    process.send_signal(signal.SIGKILL)
    assert await read_report(reader) is None
    assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
    writer.close()


CHILD = """
import asyncio, sys
from saccade.processes.parent_socket import ParentSocket, Serving
parent = ParentSocket(int(sys.argv[-1]))
parent.report(Serving("grpc://127.0.0.1:1"))
asyncio.run(parent.until_closed())
"""
PARENT = """
import os, sys, time
from saccade.processes.parent_socket import start_tied
process, ours = start_tied([sys.executable, "-c", sys.argv[1]], dict(os.environ))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_child_ends_when_its_parent_is_killed(number: signal.Signals) -> None:  # F11
    """The parent has not read the report, so that the socket is reset instead of closed."""
    import psutil

    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
