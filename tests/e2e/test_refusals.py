"""A refused request is answered before its body is read, its images are fetched or decoded, or other requests end."""

import base64
import contextlib
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import images
import pytest
from faults import wait_for
from server import Server

NUM_WAITING, NUM_CONNECTED = 8, 2
"""Requests that wait for a silent host, and as many of them as must have reached it."""

STAGES = ("fetch", "hash", "queue", "decode", "preprocess", "write", "media")
"""Stages of saccade_stage_seconds that an image passes; none of them ends, and so counts, for a refused request."""


class SilentHost:
    """A host that accepts connections and never answers: the kernel accepts, and nothing reads."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._accepted: list[socket.socket] = []

    def url(self, number: int) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/{number}.png"

    @property
    def num_connections(self) -> int:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._accepted.append(self._listener.accept()[0])
        return len(self._accepted)

    def close(self) -> None:
        """End all connections, those too that wait to be accepted."""
        for connection in (self._listener, *self._accepted):
            connection.close()


@pytest.fixture
def silent_host() -> Iterator[SilentHost]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    listener.setblocking(False)
    host = SilentHost(listener)
    yield host
    host.close()


def chat(*urls: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1} | fields


HUGE = images.png(20_000, 20_000, chunks=[(b"zzZz", bytes(388_000))])
HUGE_URL = "data:image/png;base64," + base64.b64encode(HUGE).decode()
Make = Callable[[SilentHost], dict[str, Any]]
REFUSED: dict[str, tuple[Make, str, int, str]] = {
    "PNG of 20000 x 20000": (lambda host: chat(HUGE_URL), "one", 400, "image_too_large"),
    "100 images": (lambda host: chat(*map(host.url, range(100))), "one", 400, "too_many_images"),
    "unknown model": (lambda host: chat(host.url(0), model="gpt-9"), "one", 404, "model_not_found"),
    "wrong key": (lambda host: chat(host.url(0)), "three", 401, "invalid_api_key"),
}
"""What is wrong: the body, the key, the answer's status and its code."""

each = pytest.mark.parametrize(("make", "key", "status", "code"), REFUSED.values(), ids=REFUSED.keys())


def ask(server: Server, body: dict[str, Any], key: str = "one") -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]


def stages(server: Server) -> dict[str, float]:
    return {stage: server.metric("saccade_stage_seconds_count", stage=stage) for stage in STAGES}


@contextlib.contextmanager
def waiting(server: Server, host: SilentHost) -> Iterator[list[Future[tuple[int, dict[str, Any]]]]]:
    """Requests that wait for an image of *host* until the block ends."""
    with ThreadPoolExecutor(NUM_WAITING) as threads:
        requests = [threads.submit(ask, server, chat(host.url(number))) for number in range(NUM_WAITING)]
        try:
            wait_for(lambda: host.num_connections >= NUM_CONNECTED)
            yield requests
        finally:
            host.close()


@each
def test_refused_before_any_stage_of_an_image(
    tiny_server: Server, silent_host: SilentHost, make: Make, key: str, status: int, code: str
) -> None:
    before = stages(tiny_server)
    answer = ask(tiny_server, make(silent_host), key)
    assert (answer[0], answer[1]["code"]) == (status, code)
    assert (stages(tiny_server), silent_host.num_connections) == (before, 0)


@each
def test_refused_while_others_wait_for_a_host(
    tiny_server: Server, silent_host: SilentHost, make: Make, key: str, status: int, code: str
) -> None:
    with waiting(tiny_server, silent_host) as others:
        answer = ask(tiny_server, make(silent_host), key)
        assert (answer[0], answer[1]["code"]) == (status, code)
        assert [other.done() for other in others] == [False] * NUM_WAITING


def test_refused_while_its_other_images_are_fetched(tiny_server: Server, silent_host: SilentHost) -> None:
    # Those before it never come: had the refusal waited for them, it would name the first one.
    status, error = ask(tiny_server, chat(*map(silent_host.url, range(7)), HUGE_URL))
    assert (status, error["code"]) == (400, "image_too_large")
    assert error["param"] == "messages[0].content[7].image_url.url"


@pytest.mark.parametrize(
    ("key", "length", "status", "code"),
    [("three", 1000, 401, "invalid_api_key"), ("one", 1 << 30, 413, "body_too_large")],
    ids=["wrong key", "body over the limit"],
)
def test_refused_before_its_body_arrives(tiny_server: Server, key: str, length: int, status: int, code: str) -> None:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{tiny_server.port}\r\nAuthorization: Bearer {key}\r\n"
    )
    head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", tiny_server.port), timeout=60) as connection:
        connection.sendall(head.encode())
        answer = b""
        while b"}}" not in answer:
            received = connection.recv(65536)
            assert received, answer
            answer += received
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == code
