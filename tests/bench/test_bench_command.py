"""`saccade bench` against a server that answers by a script: counts, shapes and totals, never times."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, listening, plain_answer, stream
from tables import table

from saccade.cli.main import run

SMALL = ("--image-size", "16x16", "--input-tokens", "3", "--output-tokens", "3")


@pytest.fixture(autouse=True)
def metrics_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted server counts without delay."""
    monkeypatch.setattr("saccade.bench.load.METRICS_SECONDS", 0.0)


async def bench(*servers: ScriptedServer, flags: tuple[str, ...] = ()) -> int:
    """Return the exit code of `saccade bench` against *servers*, which listen meanwhile."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(listening(server))
        warmup = () if "--warmup" in flags else ("--warmup", "0")
        arguments = ["bench", *(server.url for server in servers), *SMALL, *warmup, *flags]
        return await asyncio.to_thread(run, arguments)


def lines(output: str) -> dict[str, list[str]]:
    """Return the cells of a printed table by the first of each line."""
    cells = [re.split(r"\s{2,}", line) for line in output.splitlines()]
    return {line[0]: line[1:] for line in cells if len(line) > 1}


async def test_the_time_per_token_has_the_limit_of_memory_beside_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.bench.memory_limit.TOTAL_BYTES", 1 << 20)
    for step_bytes in (10**9, 0):
        server = ScriptedServer(shows_metrics=True, step_bytes=step_bytes)
        assert await bench(server, flags=("--concurrency", "1", "--num-requests", "2")) == 0
        shown = lines(capsys.readouterr().out)
        assert ("limit of TPOT: memory" in shown) == bool(step_bytes)


async def test_one_server_under_two_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server, file = ScriptedServer(shows_metrics=True), tmp_path / "b.json"
    flags = ("--concurrency", "1,3", "--num-requests", "6", "--seed", "5", "--goodput", "ttft:60000", "tpot:60000")
    assert await bench(server, flags=(*flags, "--json", str(file))) == 0
    shown = lines(capsys.readouterr().out)
    assert shown["times in ms"] == ["1", "3"]
    assert shown["requests"] == ["6", "6"]
    assert shown["failed requests"] == ["0", "0"]
    assert shown["prompt tokens, mean"] == ["10", "10"]
    assert shown["cached prompt tokens, %"] == ["40", "40"]
    assert shown["saccade_stage_seconds decode"] == ["250", "250"]
    assert shown["goodput, requests/s"] == shown["requests/s"]
    assert len(server.chats) == 12
    assert {(body["max_tokens"], body["ignore_eos"], body["stream"]) for body in server.bodies[1:]} == {(3, True, True)}
    written = json.loads(file.read_text())
    assert (written["seed"], written["settings"]["num_requests"]) == (5, 6)
    assert written["servers"][0] | {"root": ""} == {
        "root": "", "model": "m", "version": "1.2", "takes_ignore_eos": True
    }  # fmt: skip
    records = [one for column in written["tables"][0]["columns"] for run in column["runs"] for one in run["records"]]
    assert len(records) == 12
    assert {len(one["text_ms"]) for one in records} == {3}
    assert all(one["text_ms"][0] <= one["last_ms"] <= one["end_ms"] for one in records)


async def test_progress_in_a_file_has_no_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert await bench(ScriptedServer(), flags=("--concurrency", "1", "--num-requests", "2")) == 0
    shown = capsys.readouterr()
    assert shown.err.strip()
    assert "\x1b" not in shown.out + shown.err


async def test_two_servers_are_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def noted(server: ScriptedServer, body: dict[str, Any]) -> tuple[int, str]:
        order.append(server.url)
        return plain_answer(server, body)

    servers, page = (ScriptedServer(noted), ScriptedServer(noted)), tmp_path / "b.html"
    flags = ("--concurrency", "2", "--num-requests", "4", "--alternations", "3", "--html", str(page))
    assert await bench(*servers, flags=flags) == 0
    a, b = (server.url for server in servers)
    assert order == [a, b, *[a] * 4, *[b] * 8, *[a] * 8, *[b] * 4]
    assert servers[0].chats != servers[1].chats
    shown = lines(capsys.readouterr().out)
    assert shown["times in ms"] == ["A", "B", "B / A", "95 %"]
    assert shown["requests"] == ["12", "12"]
    assert re.fullmatch(r"\d+\.\d\d to \d+\.\d\d(, not distinguishable)?", shown["TTFT p50"][3])
    text = page.read_text()
    assert text.count("<svg") == 2
    assert not re.search(r"<script|https?://(?!127\.0\.0\.1)", text)


async def test_several_loads_have_plots_over_the_loads(tmp_path: Path) -> None:
    page = tmp_path / "b.html"
    flags = ("--request-rate", "200,400", "--num-requests", "4", "--html", str(page))
    assert await bench(ScriptedServer(), flags=flags) == 0
    assert page.read_text().count("<svg") == 5


async def test_the_same_seed_sends_the_same_bytes() -> None:
    servers = [ScriptedServer(), ScriptedServer()]
    for server in servers:
        await bench(server, flags=("--num-requests", "3", "--concurrency", "1", "--seed", "7", "--turns", "3"))
    assert servers[0].bodies == servers[1].bodies


async def test_turns_carry_the_history() -> None:
    server = ScriptedServer()
    await bench(server, flags=("--num-requests", "6", "--concurrency", "1", "--turns", "3"))
    roles = [[message["role"] for message in chat] for chat in server.chats]
    turns = [["user"], ["user", "assistant", "user"], ["user", "assistant", "user", "assistant", "user"]]
    assert roles == turns * 2
    assert server.chats[2][:3] == server.chats[1]
    assert server.chats[1][1] == {"role": "assistant", "content": "abc"}


async def test_warmup_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    server = ScriptedServer(shows_metrics=True)
    await bench(server, flags=("--num-requests", "4", "--concurrency", "2", "--warmup", "3"))
    assert len(server.chats) == 7
    assert len({json.dumps(chat) for chat in server.chats}) == 7
    shown = lines(capsys.readouterr().out)
    assert (shown["requests"], shown["saccade_stage_seconds decode"]) == (["4"], ["250"])


async def test_seconds_end_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--concurrency", "1"), ("--request-rate", "50")):
        server = ScriptedServer()
        assert await bench(server, flags=(*flags, "--seconds", "0.3")) == 0
        assert lines(capsys.readouterr().out)["requests"] == [str(len(server.chats))]


async def test_a_server_without_ignore_eos(capsys: pytest.CaptureFixture[str]) -> None:
    def strict(_: ScriptedServer, body: dict[str, Any]) -> tuple[int, str]:
        return (400, "unknown field") if "ignore_eos" in body else (200, stream(cached=None))

    server = ScriptedServer(strict)
    assert await bench(server, flags=("--num-requests", "2", "--concurrency", "1")) == 0
    shown = capsys.readouterr().out
    assert "A does not take ignore_eos" in shown
    assert "cached prompt tokens" not in shown
    assert len(server.bodies) == 4


async def test_errors_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(server: ScriptedServer, _: dict[str, Any]) -> tuple[int, str]:
        texts = {3: (503, "come back\n\x1b[2Jlater"), 4: (200, "data: <\n"), 5: (200, stream([]))}
        return texts.get(len(server.bodies), (200, stream()))

    server = ScriptedServer(failing)
    assert await bench(server, flags=("--num-requests", "6", "--concurrency", "1")) == 0
    shown = capsys.readouterr().out
    assert lines(shown)["failed requests"] == ["3"]
    assert "1: 1 x HTTP 503, such as: come back [2Jlater" in shown
    assert "1: 1 x no event stream" in shown
    assert "1: 1 x no text" in shown


async def test_nothing_but_errors_has_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def full(server: ScriptedServer, _: dict[str, Any]) -> tuple[int, str]:
        return (200, stream()) if len(server.bodies) == 1 else (429, "full")

    assert await bench(ScriptedServer(full), flags=("--num-requests", "3", "--concurrency", "1")) == 1
    assert "1: 3 x HTTP 429, such as: full" in capsys.readouterr().out


async def test_a_server_that_needs_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert await bench(ScriptedServer(key="k1")) == 1
    assert "answers 401: pass a key of the server as --api-key" in capsys.readouterr().err
    file, flags = tmp_path / "b.json", ("--num-requests", "1", "--concurrency", "1")
    assert await bench(ScriptedServer(key="k1"), flags=(*flags, "--api-key", "k1", "--json", str(file))) == 0
    assert "k1" not in file.read_text()


@table(
    ("flags", "words"),
    [
        (("--concurrency", "1", "--request-rate", "2"), "exclude each other"),
        (("--concurrency", "0"), "1,10,30"),
        (("--image-size", "5"), "640x480"),
        (("--goodput", "ttft"), "ttft:500"),
        (("--json", "/nowhere/b.json"), "/nowhere/b.json"),
        ((), "No server answers at http://127.0.0.1:1."),
    ],
)
def test_wrong_flags(flags: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "http://127.0.0.1:1", *flags]) in (1, 2)
    assert words in capsys.readouterr().err
