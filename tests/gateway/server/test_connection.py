"""A client cannot make the server keep more than the body it was promised, nor for longer than it sends it."""

import contextlib
import gc
import json
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import scripted
from waiting import wait_until

from saccade.gateway.config import ConnectionLimits, GatewayConfig
from saccade.gateway.server.connection import FIRST_READ_BYTES, READ_BYTES, Connection
from saccade.gateway.server.request_reader import MAX_HEAD_BYTES
from saccade.protocol.output import FinishReason, TokenDelta

JSON = b"Content-Type: application/json\r\n"
BODY = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Content-Length: 15\r\n\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
FILLER = b"a" * (16 << 10)
CLOSED = 7
"""A state of tcp(7), as TCP_INFO tells it."""


HASTY = ConnectionLimits(
    head_seconds=0.3,
    keep_alive_seconds=0.3,
    body_grace_seconds=0.3,
    unread_seconds=0.5,
    drain_seconds=0.5,
    sweep_seconds=0.1,
)


@pytest.fixture(scope="module")
def hasty(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway with little patience."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(connections=HASTY)) as gateway:
        gateway.answer_two_tokens()
        yield gateway


def request(path: str, body: bytes, headers: bytes = b"") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode() + headers + b"\r\n" + body


def send(gateway: scripted.Gateway, pieces: Iterable[bytes]) -> bytes:
    """Send *pieces* until the server has had enough; return what it says."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            return connection.recv(1 << 16)
        except ConnectionError:
            return b"closed"


def test_an_answer_is_one_piece_and_that_to_head_has_no_body(gateway: scripted.Gateway) -> None:
    live = b" /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert send(gateway, [b"GET" + live]).endswith(b'\r\n\r\n{"status":"live"}')
    assert send(gateway, [b"HEAD" + live]).endswith(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(BODY.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b'{"prompt": "a"}')
        assert b'\r\n\r\n{"count":1,' in connection.recv(1 << 16)


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Long: ",
        CHUNKED + b"0\r\nX-Long: ",
        CHUNKED + b"1;extension=",
    ],
    ids=["request line", "header", "trailer", "chunk extension"],
)
def test_endless_head_is_cut_off(start: bytes, gateway: scripted.Gateway) -> None:
    answer = send(gateway, [start, *[FILLER] * 64])
    assert answer == b"closed" or b"head is over the limit" in answer or b"too many bytes besides its body" in answer
    assert gateway.chat().status == 200


def test_many_headers_are_cut_off(gateway: scripted.Gateway) -> None:
    answer = send(gateway, [b"GET /live HTTP/1.1\r\nHost: localhost\r\n", *[b"X-Short: a\r\n" * 1024] * 64])
    assert answer == b"closed" or b"head is over the limit" in answer


def test_chunks_of_a_byte_are_cut_off(gateway: scripted.Gateway) -> None:
    answer = send(gateway, [CHUNKED, *[b"1\r\na\r\n" * 1024] * 64])
    assert answer == b"closed" or b"too many bytes besides its body" in answer


def test_chunks_of_a_byte_are_cut_off_in_a_refused_body(tiny_qwen3_vl: Path) -> None:
    limits = ConnectionLimits(drain_seconds=60)
    with (
        scripted.running(tiny_qwen3_vl, GatewayConfig(connections=limits)) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection,
    ):
        connection.sendall(CHUNKED.replace(b"/tokenize", b"/nothing"))
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 404")
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"1\r\na\r\n" * 50_000)
            assert connection.recv(1) == b""
        connection.close()
        wait_until(lambda: gateway.connections.num_open == 0)


def test_large_chunks_do_not_hide_small_ones(gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of small chunks keeps the event loop busy for as long as it is large."""
    sizes: list[int] = []
    received = Connection.data_received

    def record(connection: Connection, data: bytes) -> None:
        sizes.append(len(data))
        received(connection, data)

    monkeypatch.setattr(Connection, "data_received", record)
    mixed = b"20000\r\n" + bytes(128 << 10) + b"\r\n" + b"1\r\na\r\n" * 20_000
    for path in (b"/nothing", b"/tokenize"):
        send(gateway, [CHUNKED.replace(b"/tokenize", path), mixed * 2, b"0\r\n\r\n"])
    assert max(sizes) <= FIRST_READ_BYTES


def num_connections() -> int:
    return sum(type(one) is Connection for one in gc.get_objects())


def test_connection_that_is_reset_while_idle_is_freed_at_once(gateway: scripted.Gateway) -> None:
    wait_until(lambda: not gateway.connections.num_open)
    gc.collect()
    before = num_connections()
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: num_connections() <= before)


def test_closed_connections_are_freed_without_the_collector(gateway: scripted.Gateway) -> None:
    wait_until(lambda: not gateway.connections.num_open)
    gc.collect()
    gc.disable()
    try:
        before = num_connections()
        half = BODY.replace(b"Content-Length: 15", b"Content-Length: 99999")
        for content in (BODY + b'{"messages": 5}', half.replace(b"/tokenize", b"/nothing") + FILLER, half + FILLER):
            with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
                connection.sendall(content)
        wait_until(lambda: not gateway.connections.num_open)
        wait_until(lambda: num_connections() <= before)
    finally:
        gc.enable()


def test_small_chunks_larger_than_their_framing_pass(gateway: scripted.Gateway) -> None:
    body = json.dumps({"prompt": "a" * 100_000}).encode()
    chunks = b"".join(b"8\r\n" + body[start : start + 8].ljust(8) + b"\r\n" for start in range(0, len(body), 8))
    answer = send(gateway, [CHUNKED[: -len(b"2\r\n{}\r\n")], chunks, b"0\r\n\r\n"])
    assert answer.startswith(b"HTTP/1.1 200"), answer


def test_large_head_and_long_pipeline_pass(gateway: scripted.Gateway) -> None:
    head = b"GET /live HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n"
    assert send(gateway, [head]).startswith(b"HTTP/1.1 200")
    assert send(gateway, [head] * 4).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (b"", b""),
        (b"GET /li", b""),
        (b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200"),
        (BODY + b"{", b"HTTP/1.1 408"),
        (CHUNKED, b"HTTP/1.1 408"),
    ],
    ids=["nothing", "head", "request and a blank line", "body", "chunked body"],
)
def test_silent_client_is_disconnected(start: bytes, said: bytes, hasty: scripted.Gateway) -> None:
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(start)
        heard = connection.recv(1 << 16)
        assert heard.startswith(said)
        if said == b"HTTP/1.1 200":
            connection.sendall(b"\r\n")  # ends the wait between two requests, and begins none
        while heard:
            heard = connection.recv(1 << 16)


@pytest.mark.parametrize("start", [b"GET /live HTTP/1.1\r\nX-A: ", BODY[:-4] + b"99999\r\n\r\n"], ids=["head", "body"])
def test_slow_trickle_of_bytes_is_disconnected(start: bytes, hasty: scripted.Gateway) -> None:
    """Each byte renewed the limit before, so that a request could go on for ever."""

    def pieces() -> Iterator[bytes]:
        yield start
        for _ in range(100):
            time.sleep(0.05)
            yield b"a"

    assert send(hasty, pieces()) in (b"", b"closed") or b"408 Request Timeout" in send(hasty, pieces())
    assert hasty.ask("GET", "/live").status == 200


def test_a_slow_body_holds_no_place(tiny_qwen3_vl: Path) -> None:
    limits = ConnectionLimits(sweep_seconds=0.1)
    with (
        scripted.running(tiny_qwen3_vl, GatewayConfig(max_requests=1, connections=limits)) as gateway,
        socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as slow,
    ):
        gateway.answer_two_tokens()
        slow.sendall(BODY + b"{")
        assert gateway.chat().status == 200
        slow.sendall(b'"prompt": "hi"}'[1:])


def test_slow_client_is_served(gateway: scripted.Gateway) -> None:
    def pieces() -> Iterator[bytes]:
        yield BODY
        for byte in b'{"messages": 5}':
            time.sleep(0.05)
            yield bytes([byte])

    assert b"`messages` must be an array, not 5" in send(gateway, pieces())


def test_client_that_waits_for_its_answer_is_not_silent(hasty: scripted.Gateway) -> None:
    hasty.worker.script = [TokenDelta("r", [300]), 0.8, TokenDelta("r", [hasty.eos], FinishReason.STOP)]
    assert hasty.chat().status == 200
    hasty.answer_two_tokens()


def test_an_answer_that_nobody_reads_is_dropped(hasty: scripted.Gateway) -> None:
    """Before, its connection stayed for ever, and so did its place and its share of the pixels."""
    hasty.worker.script = [TokenDelta("r", [300] * 64) for _ in range(4000)]
    hasty.worker.script += [60.0]
    num_aborted = hasty.worker.num_aborted
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 1})
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", hasty.port))
        reader.sendall(request("/v1/chat/completions", body.encode()))
        wait_until(lambda: hasty.worker.num_aborted > num_aborted)
        wait_until(lambda: not hasty.metric("saccade_requests_in_flight"))
        # The connection is reset: what the client did not take is not kept for it.
        wait_until(lambda: reader.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSED)
    wait_until(lambda: hasty.application.limits.memory.num_bytes == 0)
    hasty.answer_two_tokens()
    assert hasty.chat().status == 200


def test_place_is_released_when_the_answer_is_complete_not_when_read(tiny_qwen3_vl: Path) -> None:
    with scripted.running(tiny_qwen3_vl, GatewayConfig(max_requests=1)) as gateway:
        long = [TokenDelta("r", [300] * 64) for _ in range(1500)]
        gateway.worker.script = [*long, TokenDelta("r", [gateway.eos], FinishReason.STOP)]
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True})
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", gateway.port))
            reader.sendall(request("/v1/chat/completions", body.encode()))
            wait_until(lambda: gateway.metric("vllm:request_success_total", model_name="tiny", finished_reason="stop"))
            wait_until(lambda: not gateway.metric("saccade_requests_in_flight"))
            gateway.answer_two_tokens()
            assert gateway.chat().status == 200
            with reader.makefile("rb") as stream:
                assert any(line == b"data: [DONE]\n" for line in stream)


def test_a_connection_without_a_request_makes_room_for_another(tiny_qwen3_vl: Path) -> None:
    config = GatewayConfig(connections=ConnectionLimits(max_connections=3))
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
    with scripted.running(tiny_qwen3_vl, config) as gateway, contextlib.ExitStack() as opened:

        def connect(content: bytes = b"") -> socket.socket:
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=60))
            connection.sendall(content)
            return connection

        gateway.worker.script = [60.0]
        wait_until(lambda: not gateway.connections.num_open)
        silent, unfinished = connect(), connect(b"GET /li")
        wait_until(lambda: gateway.connections.num_open == 2)
        for number in range(3):
            connect(request("/v1/chat/completions", body))
            wait_until(lambda expected=number + 1: gateway.metric("saccade_requests_in_flight") == expected)
        for ended in (silent, unfinished):
            with contextlib.suppress(ConnectionError):
                assert ended.recv(1) == b""
        assert b"too many connections" in connect(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n").recv(1 << 16)
        assert gateway.metric("saccade_requests_in_flight") == 3


def test_connections_of_one_address_are_bounded(tiny_qwen3_vl: Path) -> None:
    config = GatewayConfig(connections=ConnectionLimits(max_connections=6, max_per_address=4))
    with scripted.running(tiny_qwen3_vl, config) as gateway, contextlib.ExitStack() as opened:

        def connect(address: str) -> bytes:
            connection = opened.enter_context(
                socket.create_connection(("127.0.0.1", gateway.port), timeout=60, source_address=(address, 0))
            )
            connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return connection.recv(1 << 16)

        wait_until(lambda: not gateway.connections.num_open)
        first = [connect("127.0.0.1") for _ in range(5)]
        assert [b"200 OK" in answer for answer in first] == [True] * 4 + [False]
        assert b"429" in first[-1]
        assert b"from this address" in first[-1]
        others = [connect("127.0.0.2") for _ in range(3)]
        assert [b"200 OK" in answer for answer in others] == [True] * 3  # the last takes an idle one's place
    assert gateway.connections.num_refused == 1


def test_connections_with_a_valid_key_do_not_count_towards_their_address(tiny_qwen3_vl: Path) -> None:
    config = GatewayConfig(api_keys=("secret",), connections=ConnectionLimits(max_per_address=2))
    head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\r\n"
    with scripted.running(tiny_qwen3_vl, config) as gateway, contextlib.ExitStack() as opened:
        wait_until(lambda: not gateway.connections.num_open)
        for key, expected in [("secret", b"200")] * 4 + [("wrong", b"401")] * 2 + [("secret", b"429")]:
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=60))
            with contextlib.suppress(ConnectionError):
                connection.sendall(head.format(key).encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + expected)


def test_a_refusal_is_seen_by_a_client_that_still_sends(tiny_qwen3_vl: Path) -> None:
    """urllib asks for the connection's end; closed at once, with unread bytes, it would be reset before the answer."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(max_body_bytes=1 << 16)) as gateway:
        body = b"a" * (900 << 10)
        for headers in (b"", b"Connection: close\r\n"):
            with socket.create_connection(("127.0.0.1", gateway.port), timeout=60) as connection:
                connection.sendall(request("/tokenize", body, headers))
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")
                if headers:
                    assert connection.recv(1) == b""
                else:
                    connection.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_no_more_than_a_part_of_a_refused_body_is_read(hasty: scripted.Gateway) -> None:
    head = BODY.replace(b"Content-Length: 15", b"Content-Length: 99999999999")
    num_sent = 0
    with socket.create_connection(("127.0.0.1", hasty.port), timeout=60) as connection:
        connection.sendall(head)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413")
        with contextlib.suppress(ConnectionError):
            while num_sent < 64 << 20:
                num_sent += connection.send(FILLER)
    assert num_sent < 16 << 20  # what was read, and what both ends' buffers hold


def test_a_body_of_many_pieces_arrives_whole(gateway: scripted.Gateway) -> None:  # A6
    text = "".join(f"{number} " for number in range(4 * READ_BYTES // 5))
    tokens = gateway.ask("POST", "/tokenize", {"prompt": text}).json["tokens"]
    assert gateway.ask("POST", "/detokenize", {"tokens": tokens}).json["prompt"] == text
