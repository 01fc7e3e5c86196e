"""A web server on loopback that answers as it is told and counts who connects: the canary of the fetch tests."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from saccade.media.fetch import FetchConfig, Fetcher

IMAGE = b"\x89PNG\r\n\x1a\n an image"

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = IMAGE, status: int = 200, length: int | str | None = None, **headers: str) -> bytes:
    """Return an HTTP answer after which the connection closes; *length* is what its header says of the body."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} X", "Connection: close", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in named.items()), "", ""]).encode() + body


PATIENT = {"connect_timeout_seconds": 120.0, "timeout_seconds": 120.0, "turn_timeout_seconds": 120.0}
"""A busy machine is no slow server: time limits matter only where a test sets them."""


class WebServer:
    """*num_connects* connections came, and *requests* on them: their heads, as text."""

    def __init__(self, reply: bytes | Mapping[str, bytes] | Handler) -> None:
        self.reply = reply
        self.port = 0
        self.num_connects = 0
        self.requests: list[str] = []
        self.ended = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def paths(self) -> list[str]:
        return [request.split(" ")[1] for request in self.requests]

    def headers(self, index: int = -1) -> dict[str, str]:
        """Return the headers of a request, names in lower case."""
        pairs = (line.partition(": ") for line in self.requests[index].split("\r\n")[1:] if line)
        return {name.lower(): value for name, _, value in pairs}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connects += 1
        if task := asyncio.current_task():
            self.tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            if callable(self.reply):
                await self.reply(self.paths[-1], writer)
            else:
                writer.write(self.reply if isinstance(self.reply, bytes) else self.reply[self.paths[-1]])
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()
        self.ended.set()


@contextlib.asynccontextmanager
async def serving(
    reply: bytes | Mapping[str, bytes] | Handler = answer(),  # noqa: B008
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[WebServer]:
    server = WebServer(reply)
    listener = await asyncio.start_server(server.serve, host, port, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)


class Resolver(AbstractResolver):
    """Gives *answers* in turn, the last one ever after; each is a list of addresses, empty for an unknown name.

    One that *is_silent* never answers.
    """

    is_silent = False

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_UNSPEC) -> list[ResolveResult]:
        if self.is_silent:
            await asyncio.Event().wait()
        addresses = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if not addresses:
            raise OSError("no such name")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=0,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


@contextlib.asynccontextmanager
async def fetching(
    resolver: AbstractResolver | None = None, certificates: str = os.devnull, **settings: Any
) -> AsyncIterator[Fetcher]:
    """Yield a fetcher whose FetchConfig has these *settings* and that trusts these *certificates*, none by default."""
    fetcher = Fetcher(FetchConfig(**{**PATIENT, **settings}), resolver)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", certificates)
        patch.setenv("SSL_CERT_DIR", os.devnull)
        await fetcher.start()
    try:
        yield fetcher
    finally:
        await fetcher.close()
