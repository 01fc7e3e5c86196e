"""Frames and writes answers in ways that uvicorn, which knows only HTTP/1.1, does not."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from saccade.errors import SaccadeError
from saccade.gateway.server.errors import encode_error

CONTINUE = b"HTTP/1.1 100 "
"""The beginning of what is sent before an answer, for a client that waits with its body."""


def needs_framing(cycle: RequestResponseCycle) -> bool:
    """Return whether the answer in *cycle* may need framed()."""
    return cycle.scope["http_version"] != "1.1" or cycle.waiting_for_100_continue


def framed(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """Return *app* for one request, with its answer framed in a way that the client understands.

    - HTTP/1.0 has no chunks: the end of the connection ends a body of unknown length (RFC 9112, 6.3).
    - A client that waited in vain for 100 Continue may still send its body. So nothing after the request can be read
          (RFC 9110, 10.1.1).
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        is_sized = True

        async def send_framed(message: Message) -> None:
            nonlocal is_sized
            if message["type"] == "http.response.start":
                is_sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if cycle.waiting_for_100_continue:
                    cycle.keep_alive = False
                if not is_sized and scope["http_version"] != "1.1":
                    cycle.chunked_encoding = False
            elif not is_sized and not cycle.chunked_encoding:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares each piece with it
            await send(message)

        await app(scope, receive, send_framed)

    return serve


class AnswerTransport:
    """The transport for a request's answer. *close*, which the connection provides, closes it.

    uvicorn writes the head separately, which costs a system call and a packet. If *holds_head*, the head waits for the
    first write of the body.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None], *, holds_head: bool) -> None:
        self.is_closing = transport.is_closing
        self._write = transport.write
        self._close = close
        self._holds_head = holds_head
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send *data*, or hold it if it is a head that waits for the body."""
        if self._holds_head and not data.startswith(CONTINUE):
            self._head, self._holds_head = data, False
            return
        head, self._head = self._head, b""
        self._write(head + data)

    def close(self) -> None:
        """Send the head if no body has followed, and close."""
        if self._head:
            self.write(b"")
        self._close()


def refusal(error: SaccadeError) -> bytes:
    """Return the complete HTTP response that refuses a connection before it is closed."""
    body = encode_error(error)
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body
