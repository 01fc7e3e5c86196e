"""The process tree with small real programs: restart, drain in order, nothing left."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from saccade.errors import StartupError
from saccade.supervisor import tree as tree_module
from saccade.supervisor.tree import Child, ChildSpec, Tree, answers_ready, until
from saccade.transport.local_calls import CallClient, NotReached

pytestmark = pytest.mark.ci

PROGRAM = """
import signal, sys, time
name, journal, obeys = sys.argv[1:]
def end(*_):
    if obeys == "obeys":
        open(journal, "a").write(f"end {name}\\n")
        sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(journal, "a").write(f"start {name}\\n")
while True:
    time.sleep(60)
"""
BEATING_PROGRAM = """
import asyncio, signal, sys, time
from pathlib import Path
from saccade.transport.local_calls import CallServer
path, journal = sys.argv[1:]
async def main():
    server = CallServer(Path(path), lambda request: request)
    await server.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: time.sleep(1000))
    open(journal, "a").write("start\\n")
    await asyncio.sleep(1000)
asyncio.run(main())
"""
WAIT_SECONDS = 60


def spec(name: str, journal: Path, obeys: str = "obeys", stop_seconds: float = 10.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", PROGRAM, name, str(journal), obeys), stop_seconds)


def lines(journal: Path) -> list[str]:
    return journal.read_text().splitlines() if journal.exists() else []


async def wait(condition) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def run(specs: list[ChildSpec], journal: Path) -> tuple[Tree, asyncio.Task[int]]:
    """A tree whose programs have all started."""

    async def until_ready() -> None:
        await wait(lambda: len(lines(journal)) >= len(specs))

    tree = Tree(specs, until_ready)
    running = asyncio.create_task(tree.run())
    await wait(lambda: len(lines(journal)) == len(specs) and tree.ready)
    return tree, running


async def test_signal_ends_all_in_order(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    tree, running = await run([spec("gateway", journal), spec("worker", journal)], journal)
    pids = [child.pid for child in tree.children]
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert lines(journal)[2:] == ["end gateway", "end worker"]
    assert all(pid is not None and gone(pid) for pid in pids)


async def test_signal_reaches_programs_that_end_together_at_the_same_time(tmp_path: Path) -> None:
    """The second ends while the first does not; the third begins to end after both."""
    journal = tmp_path / "journal"
    specs = [
        spec("stubborn", journal, "never", stop_seconds=3600),
        dataclasses.replace(spec("gateway", journal), ends_with_previous=True),
        spec("indexer", journal),
    ]
    tree, running = await run(specs, journal)
    os.kill(os.getpid(), signal.SIGTERM)
    await wait(lambda: "end gateway" in lines(journal))
    stubborn = tree.children[0].pid
    assert stubborn is not None
    assert not gone(stubborn)
    os.kill(stubborn, signal.SIGKILL)
    await running
    assert lines(journal)[3:] == ["end gateway", "end indexer"]


async def test_dead_child_is_started_again_and_the_other_lives_on(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    tree, running = await run([spec("gateway", journal), spec("worker", journal)], journal)
    gateway, worker = (child.pid for child in tree.children)
    assert gateway is not None
    os.kill(gateway, signal.SIGKILL)
    await wait(lambda: lines(journal).count("start gateway") == 2)
    assert tree.children[1].pid == worker
    os.kill(os.getpid(), signal.SIGINT)
    await running


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["stopped", "its loop stands still"])
async def test_child_that_answers_no_more_is_killed_and_started_again(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[bytes] = []

    class Heard(CallClient):
        async def call(self, request: bytes, seconds: float) -> bytes:
            answers.append(await super().call(request, seconds))
            return answers[-1]

    monkeypatch.setattr(tree_module, "CallClient", Heard)
    monkeypatch.setattr(tree_module, "BEAT_SECONDS", 0.5)
    monkeypatch.setattr(tree_module, "MAX_MISSED_BEATS", 3)
    journal, path = tmp_path / "journal", tmp_path / "beats.sock"
    command = (sys.executable, "-c", BEATING_PROGRAM, str(path), str(journal))
    child = Child(ChildSpec("beating program", command, beats_at=path, stop_seconds=0.0))
    running = asyncio.create_task(child.run())
    try:
        await wait(lambda: lines(journal) == ["start"])
        first = child.pid
        assert first is not None
        await wait(lambda: answers)
        os.kill(first, number)
        await wait(lambda: child.pid not in (None, first) and len(lines(journal)) == 2)
    finally:
        await child.stop()
        await running
    assert "The beating program has not answered for 1.5 s and is killed." in caplog.messages


async def test_child_that_does_not_answer_while_it_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_asked = 0

    class Deaf:
        def __init__(self, _: Path) -> None:
            pass

        def start(self) -> None:
            pass

        async def call(self, *_: object) -> bytes:
            nonlocal num_asked
            num_asked += 1
            raise NotReached

        async def close(self) -> None:
            pass

    monkeypatch.setattr(tree_module, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(tree_module, "CallClient", Deaf)
    journal = tmp_path / "journal"
    child = Child(dataclasses.replace(spec("a", journal), beats_at=tmp_path / "none"))
    running = asyncio.create_task(child.run())
    await wait(lambda: num_asked > 10 * tree_module.MAX_MISSED_BEATS and lines(journal) == ["start a"])
    await child.stop()
    await running
    assert lines(journal) == ["start a", "end a"]


async def test_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    tree, running = await run([spec("stubborn", journal, "ignores", stop_seconds=0.2)], journal)
    pid = tree.children[0].pid
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert pid is not None
    assert gone(pid)


async def test_second_signal_kills_at_once(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    _, running = await run([spec("stubborn", journal, "ignores", stop_seconds=3600)], journal)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.1)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(WAIT_SECONDS):
        await running


async def test_stopped_child_is_not_started_again(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    child = Child(ChildSpec("short", (sys.executable, "-c", f"open({str(journal)!r}, 'a').write('start\\n')")))
    running = asyncio.create_task(child.run())
    await wait(lambda: lines(journal) and child.pid is None)
    await child.stop()
    assert await running == 0
    assert lines(journal) == ["start"]


async def test_death_before_all_are_ready_ends_the_start(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    failing = ChildSpec("worker", (sys.executable, "-c", "raise SystemExit(3)"))
    tree = Tree([spec("gateway", journal), failing], asyncio.Event().wait)
    with pytest.raises(StartupError, match="worker ended with exit code 3 before it was ready"):
        await tree.run()
    assert [child.pid for child in tree.children] == [None, None]


async def test_start_ends_with_the_code_of_a_program_that_has_printed_its_error(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    failing = ChildSpec("worker", (sys.executable, "-c", "raise SystemExit(3)"), error_codes=(1, 3))
    tree = Tree([spec("gateway", journal), failing], asyncio.Event().wait)
    assert await tree.run() == 3
    assert [child.pid for child in tree.children] == [None, None]


async def test_signal_that_ends_the_start_is_named() -> None:
    command = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    tree = Tree([ChildSpec("worker", command, error_codes=(1, 2))], asyncio.Event().wait)
    with pytest.raises(StartupError, match="worker was ended by SIGKILL before it was ready"):
        await tree.run()


def test_supervisor_that_is_killed_takes_all_with_it(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    program = f"""
import asyncio, json, sys
from saccade.supervisor.tree import ChildSpec, Tree
async def until_ready():
    while tree.children[0].pid is None or not open({str(journal)!r}, "a+").tell():
        await asyncio.sleep(0.01)
    print(json.dumps(tree.children[0].pid), flush=True)
spec = ChildSpec("child", (sys.executable, "-c", {PROGRAM!r}, "child", {str(journal)!r}, "obeys"))
tree = Tree([spec], until_ready)
asyncio.run(tree.run())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = json.loads(supervisor.stdout.readline())
        supervisor.kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=WAIT_SECONDS)
    assert gone(pid)
    assert lines(journal) == ["start child", "end child"]


@pytest.mark.parametrize(("status", "expected"), [("200 OK", True), ("503 Service Unavailable", False)])
async def test_answers_ready(status: str, expected: bool) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readline()).startswith(b"GET /ready ")
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await answers_ready("127.0.0.1", port) is expected
    assert not await answers_ready("127.0.0.1", port)


async def test_until_asks_again() -> None:
    answers = iter([False, False, True])

    async def check() -> bool:
        return next(answers)

    await until(check, every_seconds=0)
    assert next(answers, None) is None
