"""`saccade ask`: questions to a server from a terminal."""

import io
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import clips
import msgspec
import pdfs
import pytest
import scripted
from server import free_port
from tables import table

from saccade.cli.bundled import bundled
from saccade.cli.main import run
from saccade.models.bundled_model import ABILITIES

IMAGE = sorted(bundled("images").glob("texts/*.png"))[0]


@pytest.fixture(scope="module")
def gateway(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl) as running:
        yield running


def asked(gateway: scripted.Gateway, *words: str) -> int:
    """The exit code of a question to *gateway*."""
    return run(["ask", *words, "--url", f"http://127.0.0.1:{gateway.port}"])


@pytest.mark.ci
def test_only_the_answer_goes_to_a_pipe(
    gateway: scripted.Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(IMAGE.read_bytes())))
    gateway.answer_pieces("a", " cat")
    assert asked(gateway, str(IMAGE), "-", "What is this?", "--system", "Be brief.", "--max-tokens", "9") == 0
    assert capsys.readouterr() == ("a cat\n", "")
    request = gateway.worker.requests[-1]
    assert (len(request.media), request.sampling.max_tokens) == (2, 9)
    assert "Be brief." in gateway.tokenizer.decode(request.token_ids)


def test_videos_and_pdfs_are_sent_as_what_they_are(gateway: scripted.Gateway, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clips.clip())
    (tmp_path / "pages.pdf").write_bytes(pdfs.pdf(pdfs.TEXT))
    gateway.answer_two_tokens()
    assert asked(gateway, str(tmp_path / "clip.mp4"), str(tmp_path / "pages.pdf"), "What is new?") == 0
    assert {item.modality for item in gateway.worker.requests[-1].media} == {"image", "video"}


def test_figures_follow_on_a_terminal_and_control_characters_do_not_reach_it(
    gateway: scripted.Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    gateway.answer_pieces("a", "\x1b[2J", num_cached_tokens=5)
    assert asked(gateway, "Hello?") == 0
    answer, figures = capsys.readouterr().out.splitlines()
    assert answer == "a\ufffd[2J"
    assert "TTFT " in figures
    assert "tokens in the prompt, 5 of them cached" in figures


def test_error_of_the_server_is_its_sentence(
    gateway: scripted.Gateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.png").write_bytes(IMAGE.read_bytes()[:20])
    assert asked(gateway, str(tmp_path / "broken.png"), "What?") == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("saccade: ")
    assert "truncated" in shown.err
    assert "{" not in shown.err


@table(
    ("words", "sentence"),
    [
        ([], "The question is missing"),
        ([str(IMAGE)], "The question is missing; it comes last: `saccade ask IMAGE"),
        (["nope.png"], "The question is missing"),
        (["nope.png", "What?"], "There is no image nope.png. If it is a word of the question, put the whole question"),
        ([str(IMAGE.parent), "What?"], "Cannot read "),
        (["What?", "--ulr", "x"], "There is no flag --ulr"),
        (
            ["--image", str(IMAGE), "What?"],
            "There is no flag --image of `saccade ask`. Images have none: `saccade ask I",
        ),
        (["What?", "--url", "localhost:8000"], "--url localhost:8000 must be the address of an API"),
        (["What?", "--url", "http://127.0.0.1:9"], "No server answers at http://127.0.0.1:9/v1."),
        (["What?", "--url", "http://127.0.0.1:9", "--model", "m"], "No server answers at http://127.0.0.1:9/v1."),
    ],
)
def test_what_cannot_be_asked_is_explained(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ask", *words]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.ci
def test_bundled_model_answers_if_no_server_does(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.cli.served_model.DEFAULT_URL", f"http://127.0.0.1:{free_port()}/v1")
    assert run(["ask", str(IMAGE), "What does it say?"]) == 0
    shown = capfd.readouterr()
    assert shown.out.strip() == IMAGE.stem.partition("-")[0]
    assert "the bundled model answers this once" in shown.err
    assert f"{ABILITIES} `saccade serve MODEL`" in shown.err


def test_what_the_server_notes_about_a_model_follows_its_answer(
    tiny_qwen3_vl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    description = msgspec.structs.replace(
        scripted.describe(tiny_qwen3_vl), aliases=("other",), note="It \x1b[2Jguesses."
    )
    with scripted.serving(description) as gateway:
        for words in ((), ("--model", "other")):
            gateway.answer_pieces("a")
            assert asked(gateway, "Hello?", *words) == 0
            assert capsys.readouterr() == ("a\n", "saccade: It \ufffd[2Jguesses.\n")


class UnlistedModels(BaseHTTPRequestHandler):
    """A server that answers chats, and GET requests with the status *listing* or a page."""

    listing = 404

    def do_GET(self) -> None:
        if self.listing == 404:
            self._send(404, "application/json", b'{"error": {"message": "There is no /v1/models here."}}')
        else:
            self._send(self.listing, "text/html", b"<html></html>")

    def do_POST(self) -> None:
        delta = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        delta["choices"] = [{"index": 0, "delta": {"content": "yes"}, "finish_reason": "stop"}]
        self._send(200, "text/event-stream", f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n".encode())

    def _send(self, status: int, media_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@table("listing", [404, 200])
def test_a_named_model_needs_no_list(listing: int, capsys: pytest.CaptureFixture[str]) -> None:
    handler = type("Handler", (UnlistedModels,), {"listing": listing})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["ask", "Is it?", "--url", f"http://127.0.0.1:{server.server_port}"]
        assert run([*words, "--model", "m"]) == 0
        assert capsys.readouterr() == ("yes\n", "")
        assert run(words) == 1
        server.shutdown()
    assert "which is not an answer of the OpenAI API" in capsys.readouterr().err
