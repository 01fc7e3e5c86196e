"""A number of thousands of digits, wherever a request has one, is a number or an error of the request. # F11"""

import json
from collections.abc import Iterator

import pytest
import scripted
from segments import answers, exchange
from tables import table

pytestmark = pytest.mark.ci

NINES, ZEROS = "9" * 5000, "0" * 5000
BODY = b'{"prompt": "a b"}'


def head(method: str, path: str, *fields: str) -> bytes:
    """Return the head of the last request on its connection."""
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        "Connection: close",
        *fields,
    )
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def sized(method: str, path: str, body: bytes = BODY, *fields: str) -> bytes:
    return head(method, path, f"Content-Length: {len(body)}", *fields) + body


def chunks(size: str, more: bytes = b"0\r\n\r\n") -> bytes:
    return head("POST", "/tokenize", "Transfer-Encoding: chunked") + f"{size}\r\n".encode() + BODY + b"\r\n" + more


LENGTHS: dict[str, tuple[bytes, int]] = {
    "length with zeros": (head("POST", "/tokenize", f"Content-Length: {ZEROS}{len(BODY)}") + BODY, 200),
    "length of zeros": (head("POST", "/tokenize", f"Content-Length: {ZEROS}"), 400),
    "length of nines": (head("POST", "/tokenize", f"Content-Length: {NINES}") + BODY, 400),
    "length over 64 bits": (head("POST", "/tokenize", f"Content-Length: {1 << 64}") + BODY, 400),
    "largest length": (head("POST", "/tokenize", f"Content-Length: {(1 << 64) - 1}") + BODY, 413),
    "length of GET with zeros": (head("GET", "/live", f"Content-Length: {ZEROS}{len(BODY)}") + BODY, 200),
    "length of a file with zeros": (head("POST", "/v1/files", f"Content-Length: {ZEROS}{len(BODY)}") + BODY, 415),
    "chunk size with zeros": (chunks(f"{ZEROS}{len(BODY):x}"), 200),
    "chunk size of nines": (chunks(NINES), 400),
    "last chunk of zeros": (chunks(f"{len(BODY):x}", ZEROS.encode() + b"\r\n\r\n"), 200),
    "chunk extension of nines": (chunks(f"{len(BODY):x};a={NINES}"), 200),
    "version": (b"GET /live HTTP/1." + NINES.encode() + b"\r\n\r\n", 400),
}
"""Framings, each with the status of its answer."""

FIELDS = {
    "Range": f"bytes={NINES}-{NINES}",
    "If-Range": NINES,
    "Expect": NINES,
    "Age": NINES,
    "Cache-Control": f"max-age={NINES}",
    "Keep-Alive": f"timeout={NINES}, max={NINES}",
    "X-Forwarded-For": f"{NINES}, 10.0.0.{NINES}, [::{NINES}]:{NINES}",
    "Forwarded": f"for=10.0.0.1:{NINES}",
    "Traceparent": f"00-{NINES}-{NINES}-01",
    "X-Request-Id": NINES,
    "Accept": f"*/*;q=0.{NINES}",
    "HTTP2-Settings": NINES,
    "Max-Forwards": NINES,
    "X-Stainless-Retry-Count": NINES,
}
"""Fields of a head that are ignored, whatever they say."""

REFUSED_FIELDS = {"Host": f"localhost:{NINES}", "Origin": f"http://localhost:{NINES}"}

PATHS = [
    f"/v1/files/{NINES}",
    f"/v1/files/file-{NINES}/content",
    f"/v1/responses/{NINES}",
    f"/v1/responses/resp_{NINES}",
    f"/v1/models/{NINES}",
    f"/{NINES}",
    f"/v1/files?limit={NINES}",
    f"/v1/files?limit=-{NINES}",
    f"/v1/files?limit={ZEROS}",
    f"/v1/files?after={NINES}",
    f"/v1/files?order={NINES}",
]
"""Paths with ids and values that nothing has."""

BODIES = [
    ("/v1/completions", '{"model": "tiny", "prompt": "a", "max_tokens": %s}'),
    ("/v1/completions", '{"model": "tiny", "prompt": "a", "seed": %s}'),
    ("/v1/completions", '{"model": "tiny", "prompt": "a", "temperature": %s}'),
    ("/v1/completions", '{"model": "tiny", "prompt": [%s]}'),
    ("/v1/completions", '{"model": "tiny", "prompt": "a", "logit_bias": {"%s": 1}}'),
    ("/v1/completions", '{"model": "tiny", "prompt": "a", "guided_regex": "a{%s}"}'),
    ("/v1/completions", '{"model": "tiny", "prompt": "a", "guided_json": {"type": "string", "maxLength": %s}}'),
    ("/v1/completions", '{"model": "tiny", "prompt": "a", "guided_json": "{\\"maxLength\\": %s}"}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": %s}'),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "mm_processor_kwargs": {"max_pixels": %s}}'),
    (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a:%s/"}}]}]}',
    ),
    ("/v1/messages", '{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": %s}'),
    ("/v1/responses", '{"model": "tiny", "input": "a", "previous_response_id": "resp_%s"}'),
    ("/v1/responses", '{"model": "tiny", "input": "a", "max_output_tokens": %s}'),
    ("/tokenize", '{"prompt": "a", "model": %s}'),
    ("/detokenize", '{"tokens": [%s]}'),
]  # fmt: skip
"""Bodies with a number that has no such value."""


@pytest.fixture(autouse=True)
def no_error_in_the_log(
    gateway: scripted.Gateway, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    yield
    assert not caplog.records
    assert "Traceback" not in "".join(capsys.readouterr())
    assert gateway.chat().status == 200


def status_of(gateway: scripted.Gateway, message: bytes) -> int:
    """Send *message*, and return the status of the one answer to it; an error is JSON with a message."""
    (answer,) = answers(exchange(gateway.port, message))
    if answer.status >= 400:
        assert "4300" not in json.loads(answer.body)["error"]["message"]
    return answer.status


@table("name", LENGTHS)
def test_long_lengths(name: str, gateway: scripted.Gateway) -> None:
    message, status = LENGTHS[name]
    assert status_of(gateway, message) == status


@table("name", FIELDS)
@table("method", ["GET", "POST"])
def test_long_fields_of_a_head_are_ignored(method: str, name: str, gateway: scripted.Gateway) -> None:
    path = "/v1/models" if method == "GET" else "/tokenize"
    assert status_of(gateway, sized(method, path, BODY, f"{name}: {FIELDS[name]}")) == 200


@table("name", REFUSED_FIELDS)
def test_long_ports_are_refused(name: str, gateway: scripted.Gateway) -> None:
    message = sized("GET", "/v1/models", b"", f"{name}: {REFUSED_FIELDS[name]}")
    assert status_of(gateway, message.replace(b"Host: localhost\r\n", b"") if name == "Host" else message) == 403


@table("path", PATHS)
@table("method", ["GET", "DELETE"])
def test_long_ids_and_values_are_refused(method: str, path: str, gateway: scripted.Gateway) -> None:
    assert status_of(gateway, head(method, path)) in (400, 404, 405)


@table(("path", "body"), BODIES)
@table("digits", [NINES, "-" + NINES], ["nines", "negative"])
def test_long_numbers_in_bodies_are_refused(path: str, body: str, digits: str, gateway: scripted.Gateway) -> None:
    assert status_of(gateway, sized("POST", path, (body % digits).encode())) in (400, 404)
