"""`saccade batch` against a server that answers by a script."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import ScriptedServer, listening
from tables import table

from saccade.bench.client import Server, new_session
from saccade.cli.main import run
from saccade.eval.batch import Request, answer_line

URL = "/v1/chat/completions"
BODY = {"model": "m", "messages": []}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files lie in the test's folder, and nothing wait before it asks again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("saccade.eval.runner.RETRY_SECONDS", (0.0,))


def request(name: str, **fields: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": URL, "body": BODY} | fields


def write(*requests: dict[str, Any]) -> None:
    Path("in.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in requests))


def results() -> dict[str, dict[str, Any]]:
    lines = map(json.loads, Path("in.results.jsonl").read_text().splitlines())
    return {line["custom_id"]: line for line in lines}


async def test_answers_and_errors_then_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(server: ScriptedServer, body: dict[str, Any]) -> tuple[int, str]:
        if body["messages"] and len(server.bodies) < 6:
            return 400, '{"error": {"message": "no"}}'
        return (503, "") if len(server.bodies) == 2 else (200, '{"choices": []}')

    server = ScriptedServer(answer)
    write(request("a"), request("b"), request("c", body=BODY | {"messages": [1]}))
    async with listening(server):
        command = ["batch", "in.jsonl", "--url", server.url, "--concurrency", "1"]
        assert await asyncio.to_thread(run, command) == 1
        assert "3 requests: 2 good answers, 0 of them from before, in in.results.jsonl" in capsys.readouterr().out
        assert results()["b"]["response"] == {"status_code": 200, "request_id": "", "body": {"choices": []}}
        assert results()["c"]["response"]["status_code"] == 400
        assert results()["c"]["response"]["body"] == {"error": {"message": "no"}}
        assert {line["error"] for line in results().values()} == {None}
        server.bodies.append({})
        assert await asyncio.to_thread(run, command) == 0
    assert len(server.bodies) == 6
    assert "3 requests: 3 good answers, 2 of them from before" in capsys.readouterr().out
    assert sorted(results()) == ["a", "b", "c"]


async def test_answers_to_other_requests_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    server = ScriptedServer(lambda server, _: (400, "{}") if server.bodies[1:] else (200, "{}"))
    async with listening(server):
        command = ["batch", "in.jsonl", "--url", server.url]
        write(request("a"))
        assert await asyncio.to_thread(run, command) == 0
        write(request("b"))
        assert await asyncio.to_thread(run, command) == 1
    assert "1 requests: 0 good answers, 0 of them from before" in capsys.readouterr().out


async def test_no_answer_is_an_error() -> None:
    async with new_session(5) as session:
        server = Server("http://127.0.0.1:1", session)
        assert await server.post(URL, b"{}") == (
            0,
            "No server answers at http://127.0.0.1:1. Start it, or correct the URL.",
            "",
        )
    line = answer_line(Request("a", URL, {}, "POST"), 0, "No.", "")
    assert (line["response"], line["error"]) == (None, {"code": "no_answer", "message": "No."})


@table(
    ("lines", "words"),
    [
        ([request("a"), request("a")], "line 2: an earlier line has the same"),
        ([request("a", method="GET")], "line 1, is no request"),
        ([request("a", url="http://elsewhere/v1/chat/completions")], "line 1, is no request"),
        ([request("a", body=BODY | {"stream": True})], "are not streamed"),
        ([], "No server answers at http://127.0.0.1:1."),
    ],
)
def test_wrong_files(lines: list[dict[str, Any]], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(*lines)
    assert run(["batch", "in.jsonl", "--url", "http://127.0.0.1:1"]) == 1
    assert words in capsys.readouterr().err.replace("\n", " ")
