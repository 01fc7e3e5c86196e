"""What a request brought is freed when it is refused or its client has left, without the collector. # F11"""

import base64
import contextlib
import gc
import gzip
import http.client
import json
import socket
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chats
import encoded
import grammar_trials
import images
import psutil
import pytest
import scripted
from waiting import wait_until

from saccade.errors import WorkerFailed
from saccade.gateway.config import GatewayConfig
from saccade.gateway.server.content_coding import zstd
from saccade.protocol.output import TokenDelta

MIB = 1 << 20
FILLER = "A" * (2 * MIB)
NOT_JSON = b'{"messages": "' + FILLER.encode()
DAMAGED = "data:image/png;base64," + base64.b64encode(images.png(640, 640) + FILLER.encode()).decode()
NOISE = chats.data_url(chats.random_image(700, 700, 0))
MOST_KEPT = MIB // 2
"""Of 2 MiB and more that a request brings: small things of the server may grow meanwhile."""

CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"


def chat(content: Any = FILLER, **fields: Any) -> dict[str, Any]:
    """The body of a chat."""
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}


def image(*urls: str) -> list[Any]:
    """Parts with images."""
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def form(**fields: str) -> bytes:
    """A form with a file."""
    parts = [f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items()]
    file = f'--b\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n{FILLER}\r\n--b--\r\n'
    return "".join((*parts, file)).encode()


FORM = {"Content_Type": "multipart/form-data; boundary=b"}

REFUSED: dict[str, tuple[int, str, Any, dict[str, str]]] = {
    "unknown model": (404, CHATS, chat(model="none"), {}),
    "too long a text": (400, CHATS, chat(), {}),
    "too long a text of a stream": (400, CHATS, chat(stream=True), {}),
    "not JSON": (400, CHATS, NOT_JSON, {}),
    "not UTF-8": (400, CHATS, NOT_JSON + b'\xff"}', {}),
    "truncated gzip": (400, CHATS, gzip.compress(NOT_JSON)[:-4], {"Content_Encoding": "gzip"}),
    "not JSON in zstd": (400, CHATS, zstd.compress(NOT_JSON), {"Content_Encoding": "zstd"}),
    "bytes after deflate": (400, CHATS, zlib.compress(NOT_JSON) + b"{", {"Content_Encoding": "deflate"}),
    "a bomb": (413, CHATS, encoded.gzip_bomb(80), {"Content_Encoding": "gzip"}),
    "an array": (400, CHATS, [FILLER], {}),
    "unknown role": (400, CHATS, {"model": "tiny", "messages": [{"role": "boss", "content": FILLER}]}, {}),
    "role of a wrong type": (400, CHATS, {"model": "tiny", "messages": [{"role": 5, "content": FILLER}]}, {}),
    "too long a role": (400, CHATS, {"model": "tiny", "messages": [{"role": FILLER, "content": "a"}]}, {}),
    "too long a parameter": (400, CHATS, chat("a", stop=FILLER), {}),
    "parameter out of its range": (400, CHATS, chat(temperature=9), {}),
    "unsupported parameter": (400, CHATS, chat(functions=[{"name": "f"}]), {}),
    "too long tools": (
        400,
        CHATS,
        chat("a", tools=[{"type": "function", "function": {"name": "f", "description": FILLER}}]),
        {},
    ),
    "too long a regular expression": (400, CHATS, chat("a", guided_regex=FILLER), {}),
    "a schema that is none": (400, CHATS, chat("a", guided_json={"type": FILLER}), {}),
    "not base64": (400, CHATS, chat(image(DAMAGED + "!")), {}),
    "not an image": (400, CHATS, chat(image("data:image/png;base64," + FILLER)), {}),
    "one image of two that is none": (400, CHATS, chat(image(DAMAGED, "data:image/png;base64,AAAA")), {}),
    "damaged image": (400, CHATS, chat(image(DAMAGED)), {}),
    "damaged image of a stream": (400, CHATS, chat(image(DAMAGED), stream=True), {}),
    "image at a host that is not allowed": (400, CHATS, chat(image("http://127.0.0.1/" + FILLER)), {}),
    "video for a model without videos": (400, CHATS, chat([{"type": "video_url", "video_url": {"url": DAMAGED}}]), {}),
    "Messages, unknown model": (404, MESSAGES, chat(model="none", max_tokens=5), {}),
    "Messages, too long a text": (400, MESSAGES, chat(max_tokens=5), {}),
    "Messages, not JSON": (400, MESSAGES, NOT_JSON, {}),
    "Messages, count of tokens": (400, f"{MESSAGES}/count_tokens", NOT_JSON, {}),
    "Responses, unknown model": (404, "/v1/responses", {"model": "none", "input": FILLER}, {}),
    "Responses, too long a text": (400, "/v1/responses", {"model": "tiny", "input": FILLER}, {}),
    "Responses, unknown response": (
        400,
        "/v1/responses",
        {"model": "tiny", "input": FILLER, "previous_response_id": "resp_a"},
        {},
    ),
    "Completions, too long a text": (400, "/v1/completions", {"model": "tiny", "prompt": FILLER}, {}),
    "Completions, one text of two": (400, "/v1/completions", {"model": "tiny", "prompt": ["a", FILLER]}, {}),
    "tokenize, neither": (400, "/tokenize", {"model": "tiny", "text": FILLER}, {}),
    "tokenize, unknown model": (404, "/tokenize", {"model": "none", "prompt": FILLER}, {}),
    "detokenize, too long a text": (400, "/detokenize", {"model": "tiny", "tokens": FILLER}, {}),
    "file that is no image": (400, "/v1/files", form(purpose="vision"), FORM),
    "file without purpose": (400, "/v1/files", form(), FORM),
    "form that is none": (400, "/v1/files", FILLER.encode(), FORM),
    "no such path": (404, "/v1/none", chat(), {}),
    "another method": (405, "/v1/models", chat(), {}),
    "another type of body": (415, CHATS, chat(), {"Content_Type": "text/plain"}),
    "body over its limit": (413, CHATS, b"a" * (9 * MIB), {}),
}

LEFT: dict[str, tuple[str, Any]] = {
    "chat": (CHATS, chat(image(NOISE))),
    "stream": (CHATS, chat(image(NOISE), stream=True)),
    "several samples": (CHATS, chat(image(NOISE), n=3)),
    "two prompts": ("/v1/completions", {"model": "tiny", "prompt": ["a", "b"], "metadata": {"a": FILLER}}),
    "stream of two prompts": (
        "/v1/completions",
        {"model": "tiny", "prompt": ["a", "b"], "metadata": {"a": FILLER}, "stream": True},
    ),
    "Messages": (
        MESSAGES,
        chat(
            [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": NOISE.split(",")[1]}}],
            max_tokens=5,
        ),
    ),
}
SCRIPTS: dict[str, list[scripted.Step]] = {
    "fails at once": [WorkerFailed("x")],
    "fails later": [TokenDelta("r", [300]), WorkerFailed("x")],
    "fails in an unforeseen way": [TokenDelta("r", [300]), ValueError("x")],
}


@pytest.fixture(scope="module")
def gateway(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway of its own, whose process collects nothing; the collector is off until the module ends."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(max_body_bytes=8 * MIB)) as gateway:
        gc.collect()
        gc.disable()
        yield gateway
    gc.enable()


@contextlib.contextmanager
def connected(gateway: scripted.Gateway, path: str, length: int, **headers: str) -> Iterator[socket.socket]:
    """A connection over which the head of a request with a body of *length* bytes was sent."""
    fields = {"Host": "localhost", "Content-Length": str(length), "Content-Type": "application/json"}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode())
        yield connection


def refuse(gateway: scripted.Gateway, path: str, body: bytes, **headers: str) -> int:
    """Send a request whole, and return the status of its answer."""
    with connected(gateway, path, len(body), **headers) as connection:
        with contextlib.suppress(ConnectionError):  # the answer may come before the body's end
            connection.sendall(body)
        response = http.client.HTTPResponse(connection)
        response.begin()
        response.read()
        return response.status


def leave(gateway: scripted.Gateway, path: str, body: bytes) -> None:
    """Send a request, and leave when the worker computes its answer."""
    gateway.worker.requests.clear()
    gateway.worker.script = [60.0]
    with connected(gateway, path, len(body)) as connection:
        connection.sendall(body)
        wait_until(lambda: bool(gateway.worker.requests))


def leave_at_once(gateway: scripted.Gateway, path: str, body: bytes) -> None:
    """Send a request whole, and leave."""
    with connected(gateway, path, len(body)) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(body)  # it may be refused before its end


def is_idle(gateway: scripted.Gateway) -> bool:
    """Whether no connection is open and no byte of a request is counted."""
    return gateway.connections.num_open == 0 and gateway.application.limits.memory.num_bytes == 0


def kept_by(gateway: scripted.Gateway, request: Callable[[], object]) -> int:
    """Return how many bytes more are allocated when *request* is over than before it."""
    before, _ = tracemalloc.get_traced_memory()
    request()
    gateway.worker.pixels.clear()
    gateway.worker.requests.clear()
    wait_until(lambda: is_idle(gateway))
    # The last steps of a request come after its end was counted.
    with contextlib.suppress(AssertionError):
        wait_until(lambda: tracemalloc.get_traced_memory()[0] - before < MOST_KEPT)
    return tracemalloc.get_traced_memory()[0] - before


@pytest.fixture
def traced() -> Iterator[None]:
    """Python's allocations are counted."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_refused_requests_keep_no_memory(gateway: scripted.Gateway) -> None:
    gateway.answer_two_tokens()
    for name, (status, path, fields, headers) in REFUSED.items():
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        statuses = [refuse(gateway, path, body, **headers)]  # the first one fills caches
        kept = kept_by(gateway, lambda: statuses.append(refuse(gateway, path, body, **headers)))  # noqa: B023
        assert statuses == [status, status], name
        assert kept < MOST_KEPT, f"{name}: {kept:,} bytes"


@pytest.mark.usefixtures("traced")
def test_disconnected_requests_keep_no_memory(gateway: scripted.Gateway) -> None:
    for name, (path, fields) in LEFT.items():
        body = json.dumps(fields).encode()
        leave(gateway, path, body)
        kept = kept_by(gateway, lambda: leave(gateway, path, body))  # noqa: B023
        assert kept < MOST_KEPT, f"{name}: {kept:,} bytes"


@pytest.mark.usefixtures("traced")
def test_requests_disconnected_at_once_keep_no_memory(gateway: scripted.Gateway) -> None:
    gateway.worker.script = [60.0]
    bodies = {name: (path, fields) for name, (_, path, fields, headers) in REFUSED.items() if not headers}
    del bodies["body over its limit"]  # it is not read to its end
    for name, (path, fields) in (bodies | LEFT).items():
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        leave_at_once(gateway, path, body)
        kept = kept_by(gateway, lambda: leave_at_once(gateway, path, body))  # noqa: B023
        assert kept < MOST_KEPT, f"{name}: {kept:,} bytes"


@pytest.mark.usefixtures("traced")
def test_requests_disconnected_during_a_grammar_trial_keep_no_memory(gateway: scripted.Gateway) -> None:
    def leave_trial(letter: str) -> None:
        body = json.dumps(chat(image(NOISE), guided_regex=f"{letter}|b")).encode()
        with connected(gateway, CHATS, len(body)) as connection:
            connection.sendall(body)
            wait_until(grammar_trials.children)
            (child,) = grammar_trials.children()
            child.suspend()
        wait_until(lambda: not child.is_running())

    leave_trial("a")
    assert kept_by(gateway, lambda: leave_trial("c")) < MOST_KEPT


@pytest.mark.usefixtures("traced")
def test_bodies_that_were_cut_off_keep_nothing(gateway: scripted.Gateway) -> None:
    def cut_off() -> None:
        with connected(gateway, CHATS, len(NOT_JSON) + 10) as connection:
            connection.sendall(NOT_JSON)
            wait_until(lambda: gateway.application.limits.memory.num_bytes > 0)

    cut_off()
    assert kept_by(gateway, cut_off) < MOST_KEPT


@pytest.mark.usefixtures("traced")
def test_failed_answers_keep_nothing(gateway: scripted.Gateway) -> None:
    for name, script in SCRIPTS.items():
        for is_streamed in (False, True):
            body = json.dumps(chat(image(NOISE), stream=is_streamed)).encode()

            def fail(script: list[scripted.Step] = script, body: bytes = body) -> None:
                gateway.worker.script = list(script)
                refuse(gateway, CHATS, body)

            fail()
            kept = kept_by(gateway, fail)
            assert kept < MOST_KEPT, f"{name}, {'stream' if is_streamed else 'whole'}: {kept:,} bytes"


@pytest.mark.conformance
def test_forty_large_bodies_are_freed(tiny_qwen3_vl: Path) -> None:
    """Forty refusals and forty departures with bodies of 62 MiB leave the process at most 64 MiB larger."""
    process = psutil.Process()
    large = b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,'
    large += b"A" * (62 * MIB) + b'"}}]}]}'
    gc.collect()
    gc.disable()
    try:
        with scripted.running(tiny_qwen3_vl, GatewayConfig(max_request_memory_bytes=256 * MIB)) as gateway:
            before = process.memory_info().rss
            for number in range(40):
                assert refuse(gateway, CHATS, large) == 400
                leave_at_once(gateway, CHATS, large)
                wait_until(lambda: is_idle(gateway))
                # A thread may still decode the image of the client that left.
                with contextlib.suppress(AssertionError):
                    wait_until(lambda: process.memory_info().rss - before < 64 * MIB)
                grown = process.memory_info().rss - before
                assert grown < 64 * MIB, f"{grown:,} bytes after {number + 1} refusals and departures"
    finally:
        gc.enable()
