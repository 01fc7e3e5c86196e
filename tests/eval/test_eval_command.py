"""`saccade eval` against servers that answer by a script."""

import asyncio
import base64
import io
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from scripted_server import ScriptedServer, event, listening, stream, usage
from tables import table

from saccade.cli.main import run
from saccade.eval.questions import data_url
from saccade.eval.tasks import source_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files lie in the test's folder, and nothing wait before it asks again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("saccade.eval.runner.RETRY_SECONDS", (0.0, 0.0))


@cache
def known() -> dict[str, tuple[int, str]]:
    """The number and the answer of each of ten generated questions, by the URL of its image."""
    asked = enumerate(source_of((), None, 10, has_steps=False).questions())
    return {data_url(part): (n, one.answers[0]) for n, one in asked for part in one.parts if isinstance(part, bytes)}


def knowing(is_right: Callable[[int], bool] = lambda _: True) -> Callable[..., tuple[int, str]]:
    """Answer the questions whose number *is_right*."""

    def answer(_: ScriptedServer, body: dict[str, Any]) -> tuple[int, str]:
        number, text = known()[body["messages"][0]["content"][0]["image_url"]["url"]]
        return 200, stream(["It is ", text if is_right(number) else "<b>"])

    return answer


async def evaluate(*servers: ScriptedServer, flags: tuple[str, ...] = (), limit: int = 10) -> int:
    """Return the exit code of `saccade eval` against *servers*, which listen meanwhile."""
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(listening(server))
        urls = [word for server in servers for word in ("--against", server.url)][1:]
        return await asyncio.to_thread(run, ["eval", *urls, "--limit", str(limit), *flags])


def lines(output: str) -> dict[str, list[str]]:
    """Return the cells of a printed table by the first of each line."""
    cells = [re.split(r"\s{2,}", line) for line in output.splitlines()]
    return {line[0]: line[1:] for line in cells if len(line) > 1}


async def test_scores_by_category(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = ScriptedServer(knowing(lambda number: number != 3))
    assert await evaluate(server, flags=("--json", "e.json", "--html", "e.html")) == 0
    shown = capsys.readouterr().out
    assert lines(shown)["all"] == ["10", "90.0 (59.6 to 98.2)"]
    assert lines(shown)["Scene Text-centric VQA"] == ["2", "50.0 (9.5 to 90.5)"]
    assert "A: 10 requests, 64 at a time: " in shown
    assert {(one["max_tokens"], one["temperature"], one["model"]) for one in server.bodies} == {(1024, 0, "m")}
    assert not any("seed" in one or "ignore_eos" in one or "chat_template_kwargs" in one for one in server.bodies)
    written = json.loads((tmp_path / "e.json").read_text())
    assert [one["score"] for one in written["answers"][0]] == [1, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    page = (tmp_path / "e.html").read_text()
    assert page.count("<article>") == page.count("<img") == 1
    assert "It is &lt;b&gt;" in page
    assert "http" not in page.replace(server.url, "")


async def test_the_same_command_asks_only_what_failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def failing(server: ScriptedServer, body: dict[str, Any]) -> tuple[int, str]:
        return (400, "too long") if len(server.bodies) in (2, 5) else knowing()(server, body)

    server = ScriptedServer(failing)
    async with listening(server):
        command = ["eval", server.url, "--limit", "10", "--concurrency", "1"]
        assert await asyncio.to_thread(run, command) == 1
        assert "A: 2 x HTTP 400, not in the scores, such as: too long" in capsys.readouterr().out
        with (tmp_path / "eval-ocr.jsonl").open("ab") as file:
            file.write(b'{"server": "cut')
        assert await asyncio.to_thread(run, command) == 0
        assert len(server.bodies) == 12
        assert "A: 8 answers are of an earlier run" in capsys.readouterr().out
        assert await asyncio.to_thread(run, [*command, "--max-tokens", "5"]) == 0
        assert len(server.bodies) == 22
    assert len((tmp_path / "eval-ocr.jsonl").read_text().splitlines()) == 20


async def test_transient_errors_are_tried_again() -> None:
    def busy(server: ScriptedServer, body: dict[str, Any]) -> tuple[int, str]:
        return (429, "full") if len(server.bodies) % 3 else knowing()(server, body)

    server = ScriptedServer(busy)
    assert await evaluate(server, flags=("--concurrency", "1")) == 0
    assert len(server.bodies) == 30


async def test_two_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    servers = ScriptedServer(knowing()), ScriptedServer(knowing(lambda number: number > 2))
    assert await evaluate(*servers, flags=("--html", "e.html")) == 0
    shown = capsys.readouterr().out
    assert lines(shown)["all"] == ["10", "100.0 (72.2 to 100.0)", "70.0 (39.7 to 89.2)", "-30.0 (-59.9 to -0.1)"]
    assert "Of 10 answers 7 have the same text; A is better in 3, B in 0" in shown
    assert (tmp_path / "e.html").read_text().count("<article>") == 3


async def test_a_page_has_large_images_in_small(tmp_path: Path) -> None:
    Image.new("RGB", (2000, 1000)).save(tmp_path / "large.png")
    (tmp_path / "mine.jsonl").write_text(json.dumps({"question": "q", "answer": "yes", "image": "large.png"}))
    async with listening(ScriptedServer()) as server:
        await asyncio.to_thread(run, ["eval", server.url, "contains", "mine.jsonl", "--html", "e.html"])
    image = re.search(r'src="data:image/jpeg;base64,([^"]+)"', (tmp_path / "e.html").read_text())
    assert image
    with Image.open(io.BytesIO(base64.b64decode(image[1]))) as small:
        assert small.size == (800, 400)


async def test_what_flags_send(capsys: pytest.CaptureFixture[str]) -> None:
    server = ScriptedServer(knowing())
    flags = ("--temperature", "0.5", "--runs", "2", "--no-thinking", "--extra-body", '{"top_p": 0.9}')
    assert await evaluate(server, flags=flags) == 0
    assert sorted(one["seed"] for one in server.bodies) == [0] * 10 + [1] * 10
    assert {(one["temperature"], one["top_p"]) for one in server.bodies} == {(0.5, 0.9)}
    assert all(one["chat_template_kwargs"] == {"enable_thinking": False} for one in server.bodies)
    assert "A: the runs have 100.0, 100.0 %" in capsys.readouterr().out
    server = ScriptedServer(knowing())
    assert await evaluate(server, flags=("--thinking",), limit=1) == 0
    assert "max_tokens" not in server.bodies[0]


async def test_answers_that_are_cut_off_or_empty(capsys: pytest.CaptureFixture[str]) -> None:
    end = f"data: {json.dumps({'choices': [{'delta': {}, 'finish_reason': 'length'}]})}\n\ndata: [DONE]\n\n"
    thought = event({"reasoning_content": "hm"}, usage=usage(10, None, 5)) + end
    assert await evaluate(ScriptedServer(lambda *_: (200, thought))) == 0
    shown = capsys.readouterr().out
    assert "A: 10 answers were cut off at the limit of tokens (--max-tokens)" in shown
    assert "0.0 (0.0 to 27.8)" in shown


async def test_generated_questions_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with listening(ScriptedServer()) as server:
        await asyncio.to_thread(run, ["eval", server.url, "--limit", "2", "--html", "drawn.html"])
    title = "ocr: questions that were drawn here, not those of OCRBench"
    assert f"{title}, score in %" in capsys.readouterr().out
    assert f"<h1>{title}</h1>" in (tmp_path / "drawn.html").read_text()


def test_a_refused_file_leaves_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path().iterdir())
    command = ["eval", "http://127.0.0.1:1", "ocr", "--json", "e.json", "--html", "e.html", "--answers", "new.jsonl"]
    assert run(command) == 1
    assert set(Path().iterdir()) == before


@table(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:1"], "No server answers at http://127.0.0.1:1."),
        (["http://127.0.0.1:1", "mmmu"], "needs its files"),
        (["http://127.0.0.1:1", "--html", "/nowhere/e.html"], "/nowhere/e.html"),
        (["http://127.0.0.1:1", "--answers", "foreign.txt"], "foreign.txt, line 1"),
    ],
)
def test_wrong_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("foreign.txt").write_text("a\nb\n")
    assert run(["eval", *arguments]) == 1
    assert words in capsys.readouterr().err.replace("\n", " ")
