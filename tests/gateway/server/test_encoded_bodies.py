"""Encoded bodies over HTTP: every route reads them, within the limits and the budget of plain ones. # F11"""

import contextlib
import gzip
import http.client
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import encoded
import images
import pdfs
import pytest
import scripted
from tables import table
from waiting import wait_until

from saccade.gateway.admission import LARGE_BODY_BYTES
from saccade.gateway.config import GatewayConfig
from saccade.gateway.request import COPIES
from saccade.gateway.server.content_coding import EncodedBody, zstd

MIB = 1 << 20
CHATS = "/v1/chat/completions"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n'
    + images.png(8, 8)
    + b"\r\n--b--\r\n"
)
FILES = "/v1/files"
PDF_PAGE = "/pdf_pages/1"
IS_FORM = {"Content_Type": "multipart/form-data; boundary=b"}
ROUTES: dict[str, Any] = {
    CHATS: CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": CHAT["messages"]},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/invocations": CHAT,
    "/tokenize": {"model": "tiny", "prompt": "hi"},
    "/detokenize": {"model": "tiny", "tokens": [300]},
    FILES: FORM,
    PDF_PAGE: pdfs.pdf(pdfs.TEXT),
}
"""A body for each route that reads one."""

NEEDS_STATE = {"/v1/batches"}
"""It reads no body without a database; test_batches.py sends it encoded ones."""


@pytest.fixture(scope="module", autouse=True)
def no_files_left(shared_gateway: scripted.Gateway) -> Iterator[None]:
    """Other tests list the files of the same gateway."""
    yield
    for file in shared_gateway.ask("GET", FILES).json["data"]:
        shared_gateway.ask("DELETE", f"{FILES}/{file['id']}")


Encode = Callable[[bytes], bytes]


def body_of(route: str) -> bytes:
    body = ROUTES[route]
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def send(gateway: scripted.Gateway, route: str, body: bytes, coding: str) -> scripted.Answer:
    headers = IS_FORM if route == FILES else {}
    return gateway.ask("POST", route, body, Content_Encoding=coding, **headers)


def test_every_route_with_a_body_is_in_these_tables(gateway: scripted.Gateway) -> None:
    paths = gateway.ask("GET", "/openapi.json").json["paths"]
    with_body = {path for path, methods in paths.items() if "requestBody" in methods.get("post", {})}
    assert {path.replace("{number}", "1") for path in with_body} - NEEDS_STATE == set(ROUTES)


@table("route", ROUTES)
@table("coding, encode", encoded.ENCODERS.values(), ids=encoded.ENCODERS)
def test_every_route_decodes(gateway: scripted.Gateway, route: str, coding: str, encode: Encode) -> None:
    answer = send(gateway, route, encode(body_of(route)), coding)
    assert answer.status == 200, answer.body


def test_chat_in_an_encoded_body_is_the_chat(gateway: scripted.Gateway) -> None:
    plain = gateway.chat("What is this?")
    prompts = [gateway.worker.requests.pop().token_ids]
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "What is this?"}]}).encode()
    for coding, encode in encoded.ENCODERS.values():
        assert send(gateway, CHATS, encode(body), coding).json["usage"] == plain.json["usage"]
        prompts.append(gateway.worker.requests.pop().token_ids)
    assert len(prompts) == 1 + len(encoded.ENCODERS)
    assert all(prompt == prompts[0] for prompt in prompts)


@table("route", ROUTES)
@table("coding", ["gzip", "deflate", "zstd", "br", "gzip, gzip"])
@table("before", [b"", b"\n "])
def test_every_route_takes_what_a_proxy_has_decoded(
    gateway: scripted.Gateway, route: str, coding: str, before: bytes
) -> None:
    body = body_of(route)
    answer = send(gateway, route, body if isinstance(ROUTES[route], bytes) else before + body, coding)
    assert answer.status == 200, answer.body


@table("route", ROUTES.keys() - {PDF_PAGE})
@table("coding, encode", encoded.ENCODERS.values(), ids=encoded.ENCODERS)
def test_every_route_ignores_a_byte_order_mark(
    gateway: scripted.Gateway, route: str, coding: str, encode: Encode
) -> None:
    marked = b"\xef\xbb\xbf" + body_of(route)
    for body in (encode(marked), marked):
        answer = send(gateway, route, body, coding)
        assert answer.status == 200, answer.body


UNREAD_TEXTS: dict[str, tuple[Callable[[str], bytes], str]] = {
    "UTF-16": (lambda text: text.encode("utf-16"), "its text is UTF-16; send it as UTF-8"),
    "UTF-32": (lambda text: text.encode("utf-32-be"), "its text is UTF-32; send it as UTF-8"),
    "half of a pair": (lambda text: text.replace("hi", r"\ud83d").encode(), r"\ud83d is half of a surrogate pair"),
    "half of a pair in a name": (lambda text: text.replace("model", r"\ud83d").encode(), "is half of a surrogate pair"),
}


@table("route", ROUTES.keys() - {FILES, PDF_PAGE})
@table("name", UNREAD_TEXTS)
def test_every_route_names_text_that_is_no_utf_8(gateway: scripted.Gateway, route: str, name: str) -> None:
    write, complaint = UNREAD_TEXTS[name]
    body = write(json.dumps(ROUTES[route] | {"user": "hi"}))
    for coding, encode in encoded.ENCODERS.values():
        answer = send(gateway, route, encode(body), coding)
        assert answer.status == 400
        assert complaint in answer.json["error"]["message"]


REFUSED: dict[str, tuple[str, Encode, int, str, str]] = {
    "unknown coding": ("br", lambda body: b"\x1b" + body, 415, "unsupported_content_encoding", "The coding br is not served"),
    "two codings": ("gzip, zstd", lambda body: zstd.compress(gzip.compress(body)), 415, "unsupported_content_encoding", "encoded more than once"),
    "damaged": ("gzip", lambda body: b"\x1f\x8b\x08" + body, 400, "invalid_value", "not valid gzip data"),
    "truncated": ("deflate", lambda body: encoded.raw_deflate(body)[:-2], 400, "invalid_value", "ends before its deflate"),
    "bytes after it": ("gzip", lambda body: gzip.compress(body) + b"\0", 400, "invalid_value", "Bytes follow the end"),
    **{
        f"{name} bomb": (name, lambda _, bomb=bomb: bomb(80), 413, "body_too_large", "over the limit of 67108864 bytes")  # type: ignore[misc]
        for name, bomb in encoded.BOMBS.items()
    },
}  # fmt: skip


@pytest.mark.ci
@table("route", ROUTES)
@table("name", REFUSED)
def test_every_route_refuses(gateway: scripted.Gateway, route: str, name: str) -> None:
    coding, encode, status, code, complaint = REFUSED[name]
    answer = send(gateway, route, encode(body_of(route)), coding)
    assert answer.status == status, answer.body
    assert answer.json["error"]["code"] == code
    assert complaint in answer.json["error"]["message"]
    assert answer.headers.get("accept-encoding") == ("gzip, deflate, zstd" if status == 415 else None)
    wait_until(lambda: gateway.application.limits.memory.num_bytes == 0)


@table("coding, encode", encoded.ENCODERS.values(), ids=encoded.ENCODERS)
def test_empty_body_is_called_empty(gateway: scripted.Gateway, coding: str, encode: Encode) -> None:
    for body in (b"", encode(b"")):
        answer = send(gateway, CHATS, body, coding)
        assert answer.status == 400
        assert "The body is empty" in answer.json["error"]["message"]


@contextlib.contextmanager
def sending(gateway: scripted.Gateway, coding: str) -> Iterator[http.client.HTTPConnection]:
    """A connection over which a chunked chat in *coding* has begun."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = gateway.connect()
    connection.putrequest("POST", CHATS)
    for header in (
        ("Content-Type", "application/json"),
        ("Content-Encoding", coding),
        ("Transfer-Encoding", "chunked"),
    ):
        connection.putheader(*header)
    connection.endheaders()
    with contextlib.closing(connection):
        yield connection


def send_chunk(connection: http.client.HTTPConnection, data: bytes) -> None:
    connection.send(b"%x\r\n%b\r\n" % (len(data), data))


@table("coding", encoded.BOMBS)
def test_decoded_bytes_count_as_those_of_a_chunked_body(gateway: scripted.Gateway, coding: str) -> None:
    memory = gateway.application.limits.memory
    with sending(gateway, coding) as connection:
        send_chunk(connection, encoded.BOMBS[coding](5))
        wait_until(lambda: memory.num_bytes >= COPIES * 5 * MIB)
    wait_until(lambda: memory.num_bytes == 0)


@table("coding", encoded.BOMBS)
def test_a_decoder_counts_while_its_body_arrives(gateway: scripted.Gateway, coding: str) -> None:
    memory = gateway.application.limits.memory
    gateway.worker.requests.clear()
    body = dict(encoded.ENCODERS.values())[coding](json.dumps(CHAT).encode())
    with sending(gateway, coding) as connection:
        send_chunk(connection, body[:20])
        wait_until(lambda: memory.num_bytes >= MIB)
        gateway.worker.script = [60.0]
        send_chunk(connection, body[20:])
        send_chunk(connection, b"")
        wait_until(lambda: bool(gateway.worker.requests))
        assert memory.num_bytes < MIB
    wait_until(lambda: memory.num_bytes == 0)


@pytest.fixture(scope="module")
def narrow(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway that takes bodies of up to 2 MiB."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(max_request_memory_bytes=4 * MIB)) as made:
        made.answer_two_tokens()
        yield made


@table("coding", encoded.BOMBS)
@table("is_chunked", [False, True])
def test_bomb_of_a_gibibyte_takes_no_memory(narrow: scripted.Gateway, coding: str, is_chunked: bool) -> None:
    bomb = encoded.BOMBS[coding](1024)
    tracemalloc.start()
    try:
        if is_chunked:
            with sending(narrow, coding) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for start in range(0, len(bomb), 4096):
                    send_chunk(connection, bomb[start : start + 4096])
                assert connection.getresponse().status == 413
        else:
            assert send(narrow, CHATS, bomb, coding).status == 413
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()
    assert narrow.chat().status == 200


def test_wire_bytes_are_bounded_too(narrow: scripted.Gateway) -> None:
    """Empty blocks (RFC 1951, 3.2.4) decode to nothing, however many they are."""
    endless = gzip.compress(b"")[:10] + b"\0\0\0\xff\xff" * (5 * MIB // 5)
    with sending(narrow, "gzip") as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for start in range(0, len(endless), 1 << 16):
            send_chunk(connection, endless[start : start + (1 << 16)])
    with sending(narrow, "gzip") as connection:
        send_chunk(connection, endless[: 2 * MIB + 5])
        assert connection.getresponse().status == 413


@table("coding, encode", encoded.ENCODERS.values(), ids=encoded.ENCODERS)
def test_the_limit_is_that_of_a_plain_body(narrow: scripted.Gateway, coding: str, encode: Encode) -> None:
    body = json.dumps(CHAT).encode()
    for num_bytes, status in ((2 * MIB, 200), (2 * MIB + 1, 413)):
        assert send(narrow, CHATS, encode(body + b" " * (num_bytes - len(body))), coding).status == status


def test_a_long_body_is_decoded_in_threads(gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, threads = EncodedBody.decode, dict[bool, set[str]]()
    num_bytes = 0

    def noted(body: EncodedBody) -> bytes:
        nonlocal num_bytes
        threads.setdefault(num_bytes > LARGE_BODY_BYTES, set()).add(threading.current_thread().name.rpartition("_")[0])
        output = decode(body)
        num_bytes += len(output)
        return output

    monkeypatch.setattr(EncodedBody, "decode", noted)
    assert send(gateway, CHATS, gzip.compress(json.dumps(CHAT).encode() + b" " * MIB), "gzip").status == 200
    assert threads[True] == {"prepare"}
    assert "prepare" not in threads[False]
