"""Requests in chosen segments over a real connection, and the answers to them."""

import socket
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import pytest

from saccade.gateway.server.connection import Connection


class Answer(NamedTuple):
    """An answer of HTTP, its body without chunks."""

    status: int
    headers: dict[str, str]
    body: bytes


class Reads:
    """What the server reads at a time from each of its connections.

    TCP may join or split what a client sends; how much the server takes of it is certain.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._cuts: tuple[int, ...] = ()
        self._is_by_byte = False
        self._num_received: WeakKeyDictionary[Connection, int] = WeakKeyDictionary()
        received, size = Connection.data_received, Connection.num_read_bytes.fget
        assert size is not None

        def receive(connection: Connection, data: bytes) -> None:
            self._num_received[connection] = self._num_received.get(connection, 0) + len(data)
            received(connection, data)

        def num_read_bytes(connection: Connection) -> int:
            position = self._num_received.get(connection, 0)
            cut = next((cut for cut in self._cuts if cut > position), None)
            return 1 if self._is_by_byte else size(connection) if cut is None else cut - position

        monkeypatch.setattr(Connection, "data_received", receive)
        monkeypatch.setattr(Connection, "num_read_bytes", property(num_read_bytes))

    def cut_at(self, *positions: int) -> None:
        """Read up to each of *positions* in turn, and then what there is."""
        self._cuts, self._is_by_byte = tuple(sorted(positions)), False

    def by_byte(self) -> None:
        """Read byte by byte."""
        self._is_by_byte = True


def exchange(port: int, sent: bytes | Iterable[bytes]) -> bytes:
    """Send all of *sent* on one connection, and return all that comes until the server ends it."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        for piece in (sent,) if isinstance(sent, bytes) else sent:
            connection.sendall(piece)
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    """Return all that comes until the server ends *connection*."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answers(received: bytes) -> list[Answer]:
    """Return the answers in *received*; the last one may be unfinished."""
    return list(_answers(received))


def _answers(received: bytes) -> Iterator[Answer]:
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (field.partition(": ") for field in fields)}
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1", line
        if status == "100":
            body = b""
        elif "content-length" in headers:
            length = int(headers["content-length"])
            body, received = received[:length], received[length:]
        elif headers.get("transfer-encoding") == "chunked":
            body, received = _unchunked(received)
        else:
            body, received = received, b""
        yield Answer(int(status), headers, body)


def _unchunked(received: bytes) -> tuple[bytes, bytes]:
    body = b""
    while received:
        size, _, received = received.partition(b"\r\n")
        length = int(size, 16)
        body += received[:length]
        assert received[length : length + 2] == b"\r\n"
        received = received[length + 2 :]
        if not length:
            break
    return body, received
