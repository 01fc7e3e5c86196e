"""What a client sends after a request waits for its answer, and cannot end or enter it. # F11"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import scripted
from segments import Reads, answers, exchange, read_all
from tables import table
from waiting import wait_until

from saccade.gateway.config import ConnectionLimits, GatewayConfig
from saccade.gateway.server.connection import FIRST_READ_BYTES, Connection
from saccade.protocol.output import FinishReason, TokenDelta

LIMITS = ConnectionLimits(head_seconds=0.05, sweep_seconds=0.01)
LAST = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HALF = b"GET /version HTTP/1.1\r\nHost: loc"
REST = b"alhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def hasty(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway that waits for a head only a moment, and for the next request of a connection as long as ever."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(connections=LIMITS)) as gateway:
        yield gateway


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which a connection has checked its deadlines."""
    times: list[float] = []
    checked = Connection.check_deadlines

    def check(connection: Connection, now: float) -> None:
        checked(connection, now)
        times.append(now)

    monkeypatch.setattr(Connection, "check_deadlines", check)
    return times


def wait_past_the_limit_of_a_head(sweeps: list[float]) -> None:
    start = len(sweeps)
    wait_until(lambda: len(sweeps) > start + 1 and sweeps[-1] - sweeps[start] > 2 * LIMITS.head_seconds)


def chat(stream: bool, is_chunked: bool = False, headers: bytes = b"") -> bytes:
    """Return a request for a chat."""
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + headers
    if is_chunked:
        return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


BEHIND: dict[str, tuple[bytes, bytes, list[int]]] = {
    "nothing": (b"", LAST, [200]),
    "an empty line": (b"\r\n", LAST, [200]),
    "empty lines": (b"\r\n" * 5, LAST, [200]),
    "bare LF": (b"\n", LAST, [200]),
    "CR, LF and LF": (b"\r\n\n\r\n", LAST, [200]),
    "70 KB of empty lines": (b"\r\n" * 35_000, LAST, [200]),
    "half a head": (HALF, REST, [200]),
    "an empty line and half a head": (b"\r\n" + HALF, REST, [200]),
    "half of an empty line": (b"\r", b"\n" + LAST, [200]),
    "a request": (LAST, b"", [200]),
    "a request and garbage": (LAST + b"a" * 70_000, b"", [200]),
    "garbage": (b"a" * 9, b"", [400]),
    "70 KB of garbage": (b"a" * 70_000, b"", [400]),
    "200 KB of a head": (b"GET /version HTTP/1.1\r\nX-A: " + b"a" * 200_000, b"", [400]),
    "a preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"", [400]),
}
"""What comes while the answer runs, what comes after it, and the statuses of the further answers."""


@pytest.mark.ci
@table("behind", BEHIND)
@table(("stream", "is_chunked"), [(True, False), (True, True), (False, False)], ["stream", "chunked body", "whole"])
@table("is_together", [True, False], ["in one segment", "apart"])
def test_an_answer_is_whole_whatever_comes_behind_its_request(
    behind: str, stream: bool, is_chunked: bool, is_together: bool, hasty: scripted.Gateway, sweeps: list[float]
) -> None:
    while_it_runs, after_it, statuses = BEHIND[behind]
    may_end = threading.Event()
    hasty.worker.script = [TokenDelta("r", [300]), may_end, TokenDelta("r", [301, hasty.eos], FinishReason.STOP)]
    hasty.worker.requests.clear()
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        message = chat(stream, is_chunked)
        if is_together:
            connection.sendall(message + while_it_runs)
            wait_until(lambda: hasty.worker.requests)
        else:
            connection.sendall(message)
            wait_until(lambda: hasty.worker.requests)
            connection.sendall(while_it_runs)
        wait_past_the_limit_of_a_head(sweeps)
        may_end.set()
        connection.sendall(after_it)
        first, *others = answers(read_all(connection))
    assert first.status == 200
    if stream:
        assert first.body.endswith(b"data: [DONE]\n\n")
        assert b"error" not in first.body
    else:
        assert json.loads(first.body)["choices"][0]["finish_reason"] == "stop"
    assert [one.status for one in others] == statuses


def test_an_empty_line_between_requests_ends_no_wait(hasty: scripted.Gateway, sweeps: list[float]) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        wait_past_the_limit_of_a_head(sweeps)
        connection.sendall(b"\n" + LAST)
        (answer,) = answers(read_all(connection))
        assert answer.status == 200


def test_half_a_head_has_its_time_from_the_end_of_the_answer_on(hasty: scripted.Gateway) -> None:
    hasty.answer_two_tokens()
    first, *others = answers(exchange(hasty.port, chat(stream=True) + HALF))
    assert (first.status, others) == (200, [])


def test_a_client_that_sends_much_behind_its_request_is_not_read(gateway: scripted.Gateway, reads: list[int]) -> None:
    """Else it could fill the memory while its answer runs."""
    may_end = threading.Event()
    gateway.worker.script = [may_end, TokenDelta("r", [301, gateway.eos], FinishReason.STOP)]
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(chat(stream=False))
        wait_until(lambda: gateway.worker.requests)
        num_before = sum(reads)
        connection.setblocking(False)
        piece = b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 8000 + b"\r\n\r\n"
        with contextlib.suppress(BlockingIOError):
            for _ in range(10_000):
                connection.send(piece)
        connection.setblocking(True)
        assert sum(reads) - num_before <= 3 * FIRST_READ_BYTES
        may_end.set()
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 200")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes the server has read, each time."""
    sizes: list[int] = []
    received = Connection.data_received

    def record(connection: Connection, data: bytes) -> None:
        sizes.append(len(data))
        received(connection, data)

    monkeypatch.setattr(Connection, "data_received", record)
    return sizes


def test_pipelined_requests_are_answered_in_turn(gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    one = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reads = Reads(monkeypatch)
    for cut in (reads.cut_at, reads.by_byte):
        cut()
        received = answers(exchange(gateway.port, chat(stream=True) + one * 3 + chat(stream=False) + one + LAST))
        assert [answer.status for answer in received] == [200] * 7
        assert [answer.body[:9] for answer in received[1:4]] == [b'{"status"'] * 3
        assert b"chat.completion" in received[4].body


@pytest.mark.ci
@table("num_requests", [1, 2, 5, 500])
@table("stream", [True, False], ["streams", "whole"])
@table("has_begun", [True, False], ["in the middle", "before the first token"])
def test_a_reset_of_pipelined_requests_is_no_error_of_the_server(
    num_requests: int, stream: bool, has_begun: bool, gateway: scripted.Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.worker.script = [TokenDelta("r", [300]), 60.0] if has_begun else [60.0]
    gateway.worker.requests.clear()
    gateway.worker.num_aborted = 0
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(chat(stream) * num_requests)  # 500 are more than the server reads before the answer
        wait_until(lambda: gateway.worker.requests)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: gateway.worker.num_aborted)
    wait_until(lambda: not gateway.metric("saccade_requests_in_flight") and not gateway.server.server_state.tasks)
    assert len(gateway.worker.requests) == 1
    assert not caplog.records


def test_garbage_behind_a_request_is_not_in_its_log_line(gateway: scripted.Gateway) -> None:
    gateway.answer_two_tokens()
    received = answers(exchange(gateway.port, chat(stream=True, headers=b"X-Request-Id: sound\r\n") + b"garbage"))
    assert [answer.status for answer in received] == [200, 400]
    assert "code" not in gateway.line("sound")
