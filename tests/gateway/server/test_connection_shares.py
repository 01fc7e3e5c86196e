"""Nobody holds all connections: tenants share them, what keeps the server waiting makes room, probes have their own."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted
from tables import table
from waiting import wait_until

from saccade.gateway.config import ConnectionLimits, GatewayConfig

MOST, OF_ADDRESS, FOR_PROBES = 8, 6, 2
LIMITS = ConnectionLimits(
    max_connections=MOST, max_per_address=OF_ADDRESS, num_for_probes=FOR_PROBES, waiting_seconds=0.0, drain_seconds=0.2
)
CHAT = b'{"messages": [{"role": "user", "content": "x"}]}'


def head(method: str = "GET", path: str = "/v1/models", key: str = "", more: str = "") -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}{more}\r\n".encode()


def post(path: str, key: str, kind: str, length: int | None) -> bytes:
    framing = "Transfer-Encoding: chunked\r\n" if length is None else f"Content-Length: {length}\r\n"
    return head("POST", path, key, f"Content-Type: {kind}\r\n{framing}")


JSON, FORM = "application/json", "multipart/form-data; boundary=a"
HELD = {
    "silent": b"",
    "half a head": b"GET /v1/mod",
    "a body that does not come": post("/v1/chat/completions", "evil", JSON, 200_000),
    "a slow body": post("/v1/chat/completions", "evil", JSON, 200_000) + b'{"messages"',
    "a chunked body": post("/v1/responses", "evil", JSON, None) + b"1\r\n{\r\n",
    "a slow upload": post("/v1/files", "evil", FORM, 200_000) + b"--a\r\n",
    "a body of another API": post("/v1/messages", "evil", JSON, 200_000) + b"{",
    "a body with a wrong key": post("/v1/chat/completions", "wrong", JSON, 200_000) + b"{",
    "an answer that takes long": post("/v1/chat/completions", "evil", JSON, len(CHAT)) + CHAT,
    "a pipeline": 2 * (post("/v1/chat/completions", "evil", JSON, len(CHAT)) + CHAT),
    "idle": head(key="evil"),
}
"""What is sent over each of many connections, which stay open."""


class Crowd:
    """Connections to *gateway* that stay open."""

    def __init__(self, gateway: scripted.Gateway, opened: contextlib.ExitStack) -> None:
        self._gateway, self._opened = gateway, opened

    def connect(self, content: bytes, address: str = "127.0.0.1") -> socket.socket:
        connection = self._opened.enter_context(
            socket.create_connection(("127.0.0.1", self._gateway.port), timeout=60, source_address=(address, 0))
        )
        with contextlib.suppress(ConnectionError):
            connection.sendall(content)
        return connection

    def status(self, content: bytes, address: str = "127.0.0.1") -> bytes:
        """Return the status of the answer to *content* over a connection of its own, which then closes."""
        with self.connect(content, address) as connection, contextlib.suppress(ConnectionError):
            return connection.recv(1 << 16)[9:12]
        return b""


@contextlib.contextmanager
def crowd(gateway: scripted.Gateway) -> Iterator[Crowd]:
    with contextlib.ExitStack() as opened:
        wait_until(lambda: not gateway.connections.num_open)
        gateway.worker.script = [60.0]
        yield Crowd(gateway, opened)
    wait_until(lambda: not gateway.connections.num_open)


@pytest.fixture(scope="module")
def shared(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway of several tenants."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(api_keys=("evil", "good"), connections=LIMITS)) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def keyless(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(connections=LIMITS)) as gateway:
        yield gateway


@table("content", HELD.values(), HELD)
def test_whatever_one_tenant_sends_others_and_probes_get_answers(content: bytes, shared: scripted.Gateway) -> None:
    with crowd(shared) as many:
        for number in range(3 * MOST):
            # From as many addresses as it takes: a key counts wherever it comes from.
            many.connect(content, f"127.0.0.{2 + number // 2}")
        for _ in range(3):
            assert many.status(head(path="/live")) == b"200"
            assert many.status(head(key="good")) == b"200"
        assert shared.connections.num_open <= MOST + FOR_PROBES


def test_a_tenant_has_three_quarters_of_what_others_leave(shared: scripted.Gateway) -> None:
    chat = HELD["an answer that takes long"]
    with crowd(shared) as many:
        for number in range(MOST * 3 // 4):
            many.connect(chat)
            wait_until(lambda expected=number + 1: shared.metric("saccade_requests_in_flight") == expected)
        assert many.status(chat) == b"429"
        assert many.status(head(key="good"), "127.0.0.2") == b"200"


@pytest.mark.parametrize("num_addresses", [1, 2, 4])
def test_slow_bodies_from_several_addresses_make_room(num_addresses: int, keyless: scripted.Gateway) -> None:
    content = post("/v1/chat/completions", "", JSON, 200_000) + b"{"
    with crowd(keyless) as many:
        for number in range(MOST):
            many.connect(content, f"127.0.0.{2 + number % num_addresses}")
        for _ in range(3):
            assert many.status(head(path="/health"), "127.0.0.9") == b"200"
            assert many.status(head(), "127.0.0.9") == b"200"


def test_the_slowest_of_the_largest_holder_makes_room(keyless: scripted.Gateway) -> None:
    slow = post("/v1/chat/completions", "", JSON, 200_000) + b"{"
    with crowd(keyless) as many:
        small = many.connect(slow, "127.0.0.2")
        large = [many.connect(slow + b" " * 1000 * number, "127.0.0.3") for number in range(OF_ADDRESS)]
        small_too = many.connect(slow, "127.0.0.4")
        wait_until(lambda: keyless.connections.num_open == MOST)
        assert many.status(head(), "127.0.0.9") == b"200"
        assert large[0].recv(1 << 16).startswith(b"HTTP/1.1 429")
        for kept in (small, small_too, *large[1:]):
            kept.setblocking(False)
            with pytest.raises(BlockingIOError):
                kept.recv(1)


def test_without_room_only_probes_are_answered(keyless: scripted.Gateway) -> None:
    chat = HELD["an answer that takes long"].replace(b"Authorization: Bearer evil\r\n", b"")
    with crowd(keyless) as many:
        for number in range(MOST):
            many.connect(chat, f"127.0.0.{2 + number % 2}")
            wait_until(lambda expected=number + 1: keyless.metric("saccade_requests_in_flight") == expected)
        for _ in range(FOR_PROBES + 2):
            many.connect(b"GET /li", "127.0.0.5")  # the newest of those stay
            assert many.status(head(path="/live"), "127.0.0.5") == b"200"
            assert many.status(head(), "127.0.0.5") == b"429"
        assert keyless.metric("saccade_requests_in_flight") == MOST
