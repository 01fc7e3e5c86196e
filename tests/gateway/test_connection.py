"""A client cannot make the server keep more than the body it was promised, nor for longer than it sends it."""

import socket
import time
from collections.abc import Iterable, Iterator

import pytest
import scripted

from saccade.gateway.connection import MAX_HEAD_BYTES, READ_BYTES
from saccade.protocol.output import FinishReason, TokenDelta

JSON = b"Content-Type: application/json\r\n"
BODY = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Content-Length: 15\r\n\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
FILLER = b"a" * (16 << 10)


def send(gateway: scripted.Gateway, pieces: Iterable[bytes]) -> bytes:
    """Send *pieces* until the server has had enough; return what it says."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=5) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            return connection.recv(1 << 16)
        except ConnectionError:
            return b"closed"


@pytest.mark.parametrize(
    "start",
    [b"GET /", b"GET /live HTTP/1.1\r\nHost: a\r\nX-Long: ", CHUNKED + b"0\r\nX-Long: ", CHUNKED + b"1;extension="],
    ids=["request line", "header", "trailer", "chunk extension"],
)
def test_endless_head_is_cut_off(start: bytes, gateway: scripted.Gateway) -> None:
    answer = send(gateway, [start, *[FILLER] * 64])
    assert answer == b"closed" or b"head is over the limit" in answer
    assert gateway.chat().status == 200


def test_many_headers_are_cut_off(gateway: scripted.Gateway) -> None:
    answer = send(gateway, [b"GET /live HTTP/1.1\r\nHost: a\r\n", *[b"X-Short: a\r\n" * 1024] * 64])
    assert answer == b"closed" or b"head is over the limit" in answer


def test_large_head_and_long_pipeline_pass(gateway: scripted.Gateway) -> None:
    head = b"GET /live HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n"
    assert send(gateway, [head]).startswith(b"HTTP/1.1 200")
    assert send(gateway, [head] * 4).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("start", [b"", b"GET /li", BODY + b"{"], ids=["nothing", "head", "body"])
def test_silent_client_gives_its_place_back(
    start: bytes, gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.gateway.connection.SILENCE_SECONDS", 0.2)
    assert send(gateway, [start]) == b""
    deadline = time.monotonic() + 5
    while gateway.metric("saccade_requests_in_flight"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_slow_client_is_served(gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.gateway.connection.SILENCE_SECONDS", 1.0)

    def pieces() -> Iterator[bytes]:
        yield BODY
        for byte in b'{"messages": 5}':
            time.sleep(0.1)
            yield bytes([byte])

    assert b"`messages` must be array" in send(gateway, pieces())


def test_client_that_waits_for_its_answer_is_not_silent(
    gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.gateway.connection.SILENCE_SECONDS", 0.2)
    gateway.worker.script = [TokenDelta("r", [300]), 0.8, TokenDelta("r", [gateway.eos], FinishReason.STOP)]
    assert gateway.chat().status == 200


def test_a_body_of_many_pieces_arrives_whole(gateway: scripted.Gateway) -> None:  # A6
    text = "".join(f"{number} " for number in range(4 * READ_BYTES // 5))
    tokens = gateway.ask("POST", "/tokenize", {"prompt": text}).json["tokens"]
    assert gateway.ask("POST", "/detokenize", {"tokens": tokens}).json["prompt"] == text
