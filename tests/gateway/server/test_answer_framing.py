"""A client of HTTP/1.0 gets no chunks: the end of the connection ends a body of unknown length (RFC 9112, 6.1). # F11"""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import images
import pytest
import scripted
from segments import answers, exchange, read_all
from tables import table

MESSAGES = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, b"data: [DONE]\n\n"),
    "/v1/completions": ({"prompt": "hi"}, b"data: [DONE]\n\n"),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 4}, b'data: {"type":"message_stop"}\n\n'),
    "/v1/responses": ({"input": "hi"}, b"\n\n"),
}
"""A stream of each API, and its end."""

CONNECTIONS = {"none": b"", "keep-alive": b"Connection: keep-alive\r\n", "close": b"Connection: close\r\n"}


def ask(version: str, path: str, fields: dict[str, Any], headers: bytes = b"") -> bytes:
    """Return a request for a stream."""
    body = json.dumps({"model": "tiny", "stream": True, **fields}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()
    return head + headers + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def events(body: bytes) -> list[str]:
    """The lines of a stream without the values, which have ids and times."""
    assert body.endswith(b"\n\n")
    lines = body.decode().splitlines()
    return [line if line[:6] != "data: " or line[6] != "{" else str(sorted(json.loads(line[6:]))) for line in lines]


@table("connection", CONNECTIONS)
@table("path", STREAMS)
def test_streams_to_http_1_0_end_with_their_connection(path: str, connection: str, gateway: scripted.Gateway) -> None:
    fields, end = STREAMS[path]
    behind = b"GET /live HTTP/1.0\r\nHost: localhost\r\n\r\n"
    (answer,) = answers(exchange(gateway.port, ask("1.0", path, fields, CONNECTIONS[connection]) + behind))
    assert answer.status == 200
    assert "transfer-encoding" not in answer.headers
    assert "content-length" not in answer.headers
    assert answer.headers["connection"] == "close"
    assert answer.body.endswith(end)
    (newer,) = answers(exchange(gateway.port, ask("1.1", path, fields, CONNECTIONS["close"])))
    assert newer.headers["transfer-encoding"] == "chunked"
    assert events(answer.body) == events(newer.body)


@table("path", STREAMS)
def test_pings_between_events_have_no_chunks(path: str, pinging: scripted.Gateway) -> None:
    is_pinged = threading.Event()
    pinging.answer_two_tokens()
    pinging.worker.script.insert(1, is_pinged)
    fields, end = STREAMS[path]
    received = b""
    with socket.create_connection(("127.0.0.1", pinging.port), timeout=60) as connection:
        connection.sendall(ask("1.0", path, fields))
        while b": ping\n\n" not in received:
            received += connection.recv(1 << 16)
        is_pinged.set()
        (answer,) = answers(received + read_all(connection))
    assert answer.body.endswith(end)
    lines = answer.body.decode().split("\n")
    assert all(line.startswith(("data: ", "event: ", ": ping")) for line in lines if line)


@pytest.fixture(scope="module")
def pinging(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway whose streams have pings in them."""
    with scripted.running(tiny_qwen3_vl, scripted.PINGS_OFTEN) as gateway:
        yield gateway


def test_an_answer_over_the_backlog_has_no_chunks(gateway: scripted.Gateway) -> None:
    """What a slow reader has not taken goes another way than the events after it."""
    gateway.answer_pieces(*["hi "] * 3000)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(ask("1.0", "/v1/completions", {"prompt": "hi", "max_tokens": 3500}))
        (answer,) = answers(b"".join(iter(lambda: connection.recv(1 << 10), b"")))
    texts = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["text"] for one in texts if one["choices"]) == "hi " * 3000
    assert answer.body.endswith(b"data: [DONE]\n\n")


@table(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/live", 200),
        ("HEAD", "/v1/chat/completions", 405),
        ("GET", "/nothing", 404),
        ("GET", "/", 200),
        ("GET", "/metrics", 200),
        ("GET", "/v1/files/{file}/content", 200),
        ("HEAD", "/v1/files/{file}/content", 200),
    ],
)
@table("connection", CONNECTIONS)
def test_answers_of_known_length_keep_it(
    method: str, path: str, status: int, connection: str, gateway: scripted.Gateway
) -> None:
    picture = images.png(8, 8)
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + picture + b"\r\n--b--\r\n"
    file = gateway.ask("POST", "/v1/files", form, Content_Type="multipart/form-data; boundary=b").json["id"]
    head = f"{method} {path.format(file=file)} HTTP/1.0\r\nHost: localhost\r\n".encode()
    received = exchange(gateway.port, head + CONNECTIONS[connection] + b"\r\n")
    gateway.ask("DELETE", f"/v1/files/{file}")
    fields, _, body = received.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in fields
    assert b"transfer-encoding" not in fields
    length = next(int(line[16:]) for line in fields.split(b"\r\n") if line.startswith(b"content-length: "))
    assert len(body) == (0 if method == "HEAD" else length)
    if path.endswith("content") and method == "GET":
        assert body == picture


def test_a_client_of_http_1_0_is_not_asked_for_its_body(gateway: scripted.Gateway) -> None:
    (answer,) = answers(
        exchange(gateway.port, ask("1.0", "/v1/completions", {"prompt": "hi"}, b"Expect: 100-continue\r\n"))
    )
    assert answer.status == 200
