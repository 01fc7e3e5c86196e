"""Ctrl-C ends a command at once, in a sentence that says what is kept, and leaves no process. # F8"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pdfs
import psutil
import pytest
from aiohttp import web
from scripted_server import ScriptedServer, event, listening
from waiting import wait_until

from saccade.cli.bundled import bundled
from saccade.cli.main import run

SECONDS = 60
"""Far less than the requests' own time-out, an hour."""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files lie in the test's folder: a document of three pages, and three requests."""
    monkeypatch.chdir(tmp_path)
    Path("a.pdf").write_bytes(pdfs.pdf(*[pdfs.TEXT] * 3))
    Path("a.jsonl").write_text("\n".join(map(request, "abc")))


@dataclass
class HangingServer(ScriptedServer):
    """Answers *num_good* requests, and begins an answer to the next one, which ends with the test."""

    num_good: int = 1
    is_stuck: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        if len(self.bodies) < self.num_good:
            return await super().chat(request)
        self.bodies.append(json.loads(await request.read()))
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event({"content": "The ca"}).encode())
        self.is_stuck.set()
        await self.is_over.wait()
        return response


class Ended(NamedTuple):
    """How a command ended, what it wrote, and those of its processes that are left."""

    code: int
    output: str
    errors: str
    left: list[psutil.Process]


async def begin(*words: str) -> asyncio.subprocess.Process:
    """Start `saccade WORDS` in a process group of its own, as a shell does."""
    command = (sys.executable, "-m", "saccade.cli.main", *words)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)


async def interrupt(process: asyncio.subprocess.Process) -> Ended:
    """Signal the process group, as a terminal does on Ctrl-C."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode is not None
    _, left = psutil.wait_procs(children, timeout=SECONDS)
    return Ended(process.returncode, output.decode(), errors.decode(), left)


async def interrupted(server: HangingServer, *words: str) -> Ended:
    """Interrupt a command when its server is stuck."""
    async with listening(server):
        process = await begin(*(server.url if word == "URL" else word for word in words))
        await asyncio.wait_for(server.is_stuck.wait(), SECONDS)
        try:
            return await interrupt(process)
        finally:
            server.is_over.set()


def is_engine(process: psutil.Process) -> bool:
    try:
        return "saccade.engine" in process.cmdline()
    except psutil.Error:
        # It has ended meanwhile.
        return False


def content(path: str) -> str:
    return Path(path).read_text()


def request(name: str) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}})


ONE_AT_A_TIME = ("--concurrency", "1")
READ = ("read", "a.pdf", "--url", "URL", *ONE_AT_A_TIME)


@pytest.mark.parametrize(
    ("words", "num_good", "sentence"),
    [
        (READ, 1, "1 answer is kept in read-a.pdf.jsonl; the same command goes on from there."),
        (READ, 0, "There was no answer yet, so the same command begins again."),
        (
            ("eval", "URL", "--limit", "5", *ONE_AT_A_TIME),
            2,
            "2 answers are kept in eval-ocr.jsonl; the same command goes on from there.",
        ),
        (
            ("batch", "a.jsonl", "--url", "URL", *ONE_AT_A_TIME),
            1,
            "1 answer is kept in a.results.jsonl; the same command goes on from there.",
        ),
        (("bench", "URL", *ONE_AT_A_TIME), 2, ""),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value)[:8],
)
async def test_command_says_what_is_kept(words: Sequence[str], num_good: int, sentence: str) -> None:
    before = set(os.listdir())
    ended = await interrupted(HangingServer(num_good=num_good), *words)
    assert (ended.code, ended.left) == (130, [])
    assert ended.errors.splitlines()[-1] == f"saccade: Interrupted. {sentence}".rstrip()
    assert "Traceback" not in ended.errors
    kept = sentence.partition("kept in ")[2].partition(";")[0]
    assert set(os.listdir()) - before == ({kept} if kept else set())
    if kept:
        assert [json.loads(line) is not None for line in content(kept).splitlines()] == [True] * num_good


async def test_interrupted_read_asks_only_for_the_missing_pages(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*READ, "--out", "texts")
    await interrupted(HangingServer(), *words)
    assert os.listdir("texts") == []
    async with listening(ScriptedServer()) as server:
        again = [server.url if word == "URL" else word for word in words]
        assert await asyncio.to_thread(run, ["read", *again[1:]]) == 0
        assert len(server.bodies) == 2
    assert content("texts/a.pdf.md").count("abc") == 3


async def test_interrupted_answer_is_no_whole_one() -> None:
    async with listening(server := HangingServer(num_good=0)):
        process = await begin("ask", "What is it?", "--url", server.url)
        assert process.stdout is not None
        shown = await asyncio.wait_for(process.stdout.readexactly(len("The ca")), SECONDS)
        try:
            ended = await interrupt(process)
        finally:
            server.is_over.set()
    assert shown == b"The ca"
    assert ended == Ended(130, "", "saccade: Interrupted: the answer is not complete.\n", [])


@pytest.mark.ci
async def test_interrupt_at_the_start_of_a_server_ends_the_server() -> None:
    process = await begin("read", "a.pdf", "--serve", str(bundled("model")))
    tree = psutil.Process(process.pid)
    assert await asyncio.to_thread(wait_until, lambda: any(map(is_engine, tree.children(recursive=True))))
    ended = await interrupt(process)
    assert (ended.code, ended.output, ended.left) == (130, "", [])
    assert "Traceback" not in ended.errors
    assert sorted(os.listdir()) == ["a.jsonl", "a.pdf"]


def test_interrupted_copy_leaves_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("saccade.cli.screen.StartProgress.show", lambda *_: signal.raise_signal(signal.SIGINT))
    assert run(["quantize", str(bundled("model")), "copy"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "saccade: Interrupted. Nothing was written to copy."
    assert sorted(os.listdir()) == ["a.jsonl", "a.pdf"]


async def test_generator_that_a_program_leaves_open_ends_with_it() -> None:
    program = "import sys, saccade; pages = saccade.read('a.pdf', url=sys.argv[1]); print(next(pages).page)"
    async with listening(ScriptedServer()) as server:
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program, server.url], capture_output=True, text=True, timeout=SECONDS
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
