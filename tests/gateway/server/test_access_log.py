"""One log line a request: what it holds, and that writing it never holds up a request."""

import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripted
from chats import data_url, openai_messages, random_image
from starlette.types import Message, Receive, Scope, Send
from tables import table

from saccade.errors import ModelNotFound
from saccade.gateway.server.access_log import (
    MAX_ERRORS,
    AccessLog,
    access_log,
    known_field,
    line_of_request,
    note_failure,
)
from saccade.gateway.server.middleware import WARNINGS, TelemetryMiddleware
from saccade.log_writer import LineWriter, LogOutput
from saccade.protocol.output import Failure, FinishReason, TokenDelta
from saccade.telemetry import Metrics

CHAT = "/v1/chat/completions"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def the_line(gateway: scripted.Gateway, request_id: str) -> Any:
    """The only line of a request."""
    line = gateway.line(request_id)
    assert line.pop("timestamp").endswith("Z")
    assert line.pop("seconds") >= 0
    return line


def test_a_chat_has_one_line_which_binds_its_ids(gateway: scripted.Gateway) -> None:
    gateway.worker.script = [
        TokenDelta("r", [300, 301], FinishReason.LENGTH, 16),
        TokenDelta("r", [gateway.eos], FinishReason.STOP, index=1),
    ]
    body = {"model": "tiny", "messages": openai_messages("my secret"), "n": 2}
    answer = gateway.ask("POST", CHAT, body, X_Request_Id="one-chat").json
    line = the_line(gateway, "one-chat")
    assert line.pop("ttft_seconds") > 0
    assert line == {
        "event": "request",
        "level": "info",
        "request_id": "one-chat",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "id": answer["id"],
        "model": "tiny",
        "worker": "grpc://scripted:1",
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "cached_tokens": 16,
        "completion_tokens": 3,
        "finish_reasons": ["length", "stop"],
    }
    assert gateway.worker.requests[0].request_id == answer["id"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "field", "reason"),
    [
        (
            CHAT,
            {"model": "my-secret", "messages": openai_messages("hi")},
            404,
            "model_not_found",
            "model",
            "served: tiny",
        ),
        (CHAT, {"model": "tiny", "messages": []}, 400, "invalid_value", "messages", ""),
        (CHAT, {"my-secret": 1, "messages": [{"my-secret": 1}]}, 400, "invalid_value", "messages[0].role", ""),
        ("/my-secret", {}, 404, "not_found", "", "no such path"),
        ("/live", {}, 405, "method_not_allowed", "", "does not take POST"),
    ],
)
def test_refusal_is_logged_with_code_field_and_reason(
    path: str, body: dict[str, Any], status: int, code: str, field: str, reason: str, gateway: scripted.Gateway
) -> None:
    request_id = f"refused-{code}-{field}"
    assert gateway.ask("POST", path, body, X_Request_Id=request_id).status == status
    line = the_line(gateway, request_id)
    assert (line["status"], line["code"]) == (status, code)
    assert line.get("field", "") == field
    assert reason in line.get("reason", "")
    assert "secret" not in str(line)


def test_error_within_a_stream_is_logged(gateway: scripted.Gateway) -> None:
    failure = Failure("worker_failed", "The worker has gone.")
    gateway.worker.script = [TokenDelta("r", [300]), TokenDelta("r", [], FinishReason.ERROR, failure=failure)]
    body = {"model": "tiny", "messages": openai_messages("hi"), "stream": True}
    gateway.ask("POST", CHAT, body, X_Request_Id="broken-stream")
    line = the_line(gateway, "broken-stream")
    assert (line["status"], line["code"], line["reason"]) == (200, "worker_failed", "The worker has gone.")
    assert line["finish_reasons"] == ["error"]


async def test_the_line_says_that_there_is_a_warning_without_its_words(pipe: tuple[int, int]) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[WARNINGS] = "unknown parameters ignored: best_off"

    async def nothing(message: Message) -> None:
        raise NotImplementedError(message)

    async def silence() -> Message:
        raise NotImplementedError

    writer = LineWriter(pipe[1], lambda _: b"")
    log = AccessLog(LogOutput(writer, logging.INFO, is_terminal=False))
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    await TelemetryMiddleware(app, Metrics(), log)(scope, silence, nothing)
    assert writer.flush()
    line = json.loads(os.read(pipe[0], 4096))
    assert (line["status"], line["route"], line["is_warned"]) == (499, "none", True)
    assert "best_off" not in str(line)


async def test_levels_above_info_make_no_lines_and_keep_errors(tmp_path: Path) -> None:
    writer_file = os.open(tmp_path / "lines", os.O_RDWR | os.O_CREAT)
    writer = LineWriter(writer_file, lambda _: b"")
    assert line_of_request() is None
    note_failure(ModelNotFound("no line, no error"))
    for output in (LogOutput(writer, logging.WARNING, is_terminal=False), None):
        log = access_log(output)
        line = log.begin_line("an-id", "POST", 499)
        note_failure(ModelNotFound("The model 'gone' is not served.", reason="Not served here."))
        line.status = 404
        log.end_line(line)
        (error,) = log.errors
        assert (error.request_id, error.status, error.code) == ("an-id", 404, "model_not_found")
        assert error.message == "Not served here."
    assert writer.flush()
    assert os.fstat(writer_file).st_size == 0
    os.close(writer_file)


@table(
    ("level", "route", "status", "expected"),
    [
        (logging.INFO, "/ready", 200, None),
        (logging.INFO, "/ready", 503, None),
        (logging.INFO, "/metrics", 200, None),
        (logging.INFO, "/metrics", 401, "info"),
        (logging.DEBUG, "/ready", 503, "debug"),
        (logging.INFO, "/v1/models", 200, "info"),
    ],
)
def test_probes_have_lines_at_debug(
    level: int, route: str, status: int, expected: str | None, pipe: tuple[int, int]
) -> None:
    writer = LineWriter(pipe[1], lambda _: b"")
    log = AccessLog(LogOutput(writer, level, is_terminal=False))
    line = log.begin_line("an-id", "GET", status)
    line.route = route
    log.end_line(line)
    log.end_line(log.begin_line("last", "GET", 200))
    assert writer.flush()
    first, *others = map(json.loads, os.read(pipe[0], 4096).splitlines())
    assert (first["level"] if others else None) == expected


async def test_last_errors_are_kept_and_other_requests_are_not() -> None:
    log = AccessLog()
    for number in range(MAX_ERRORS + 5):
        line = log.begin_line(str(number), "GET", 404)
        note_failure(ModelNotFound("It is not served."))
        log.end_line(line)
        log.end_line(log.begin_line("fine", "GET", 200))
    assert [error.request_id for error in log.errors] == [str(number) for number in range(MAX_ERRORS + 4, 4, -1)]


@table(
    ("path", "known"),
    [
        ("messages[0].content[12].image_url.url", "messages[0].content[12].image_url.url"),
        ("tools[0].function.parameters.properties.theirs", "tools[0].function.parameters"),
        ("theirs", ""),
        ("theirs.messages", ""),
        ("messages[theirs]", "messages"),
        ("messages[1234567]", "messages"),
        ("messages theirs", ""),
        ("messages..role", "messages"),
        ("", ""),
    ],
)
def test_a_field_has_no_name_that_a_client_made(path: str, known: str) -> None:
    assert known_field(path) == known


def test_a_line_for_people_obeys_no_one(pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], lambda _: b"")
    log = AccessLog(LogOutput(writer, logging.INFO, is_terminal=True))
    line = log.begin_line("an-id", "POST", 499)
    line.status, line.model = 200, "\x1b[2J,fine"
    log.end_line(line)
    assert writer.flush()
    text = os.read(pipe[0], 4096).decode()
    assert " 200 POST none 0.000s model=\\x1b[2J,fine request_id=an-id\n" in text


def test_short_lines_are_for_a_terminal(tiny_qwen3_vl: Path, pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], lambda _: b"")
    output = LogOutput(writer, logging.WARNING, is_terminal=True, has_short_lines=True)
    with scripted.running(tiny_qwen3_vl, log=output) as gateway:
        gateway.answer_pieces("a", "b", num_cached_tokens=3)
        image = {"type": "image_url", "image_url": {"url": data_url(random_image(64, 64, 1))}}
        assert gateway.chat([image, {"type": "text", "text": "hi"}]).status == 200
        assert gateway.ask("GET", "/live").status == 200
        assert gateway.chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]).status == 400
        assert gateway.ask("GET", "/v1/model").status == 404
        assert writer.flush()
    lines = os.read(pipe[0], 4096).decode().splitlines()
    answered, refused, lost = (line.partition(" ")[2] for line in lines)
    assert re.fullmatch(r"404 \d\.\d\d s, not_found: There is no such path here\.", lost), lost
    form = r"200 tiny, 1 image, prompt \d+ tokens, 3 cached, answer 3, TTFT \d+ ms, \d\.\d\d s"
    assert re.fullmatch(form, answered), answered
    assert re.match(r"400 /v1/chat/completions, \d\.\d\d s, unsupported_image_format: messages\[0\]", refused), refused


def test_requests_are_served_if_the_log_is_not_read(tiny_qwen3_vl: Path, pipe: tuple[int, int]) -> None:
    writer = LineWriter(pipe[1], lambda number: b'{"dropped":%d}\n' % number, max_bytes=8192)
    with scripted.running(tiny_qwen3_vl, log=LogOutput(writer, logging.INFO, is_terminal=False)) as gateway:
        for _ in range(100):
            assert gateway.ask("GET", "/version").status == 200
        dropped = gateway.ask("GET", "/metrics").body.decode().partition("\nsaccade_log_lines_dropped_total ")[2]
        assert float(dropped.split("\n")[0]) > 0
        content = b""
        while b'"dropped"' not in content:
            content += os.read(pipe[0], 1 << 16)
        assert gateway.ask("GET", "/version", X_Request_Id="after").status == 200
        # The pipe may hold a part of a line.
        while b'"after"' not in content or not content.endswith(b"\n"):
            content += os.read(pipe[0], 1 << 16)
    lines = [json.loads(line) for line in content.splitlines()]
    told = sum(line.get("dropped", 0) for line in lines)
    assert told == writer.num_dropped
    assert len([line for line in lines if "dropped" not in line]) + told >= 101
