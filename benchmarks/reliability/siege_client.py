"""What every attacker of a siege does with the server: connect from its own address, ask, read, drip."""

import asyncio
import contextlib
import itertools
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from benchmarks.reliability import siege_payloads as payloads
from benchmarks.reliability.siege_hosts import Hosts
from benchmarks.reliability.siege_workers import HostileWorkers

HOST = "127.0.0.1"
CODE = re.compile(rb'"code":\s*"(\w+)"')
ESTABLISHED = 1
RECEIVE_BUFFER_BYTES = 2048
ANSWER_BYTES = 65536
"""Of an answer's bytes so many are kept."""


@dataclass
class Prepared:
    """What an attack sends first, once: *make* asks the server and returns what the attack needs of its answer."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    found: str = ""

    async def get(self, make: Callable[[], Awaitable[str]]) -> str:
        """Return what *make* returned first."""
        async with self.lock:
            self.found = self.found or await make()
        return self.found


Messages = Callable[["Target"], Iterator[bytes]]
"""Makes the messages that an attack sends in turn, without end."""


@dataclass
class Target:
    """The server under attack, as the attackers see it: its port, its model, their key, their image hosts."""

    port: int
    model: str
    key: str
    hosts: Hosts
    serial: Iterator[int] = field(default_factory=itertools.count)
    prepared: dict[str, Prepared] = field(default_factory=dict)
    messages: dict[Messages, Iterator[bytes]] = field(default_factory=dict)
    workers: HostileWorkers | None = None

    @property
    def hostile(self) -> HostileWorkers:
        """The hostile workers of the server under attack, which a gateway of its own workers does not have."""
        if self.workers is None:
            raise ValueError("this server has no hostile workers")
        return self.workers

    def message(
        self, body: bytes, path: str = payloads.PATH, *, method: str = "POST", coding: str | None = None
    ) -> bytes:
        """Return a whole request with the attackers' key."""
        return payloads.head(len(body), self.key, path, port=self.port, method=method, coding=coding) + body

    def next_message(self, make: Messages) -> bytes:
        """Return the next of the messages that *make* makes."""
        if make not in self.messages:
            self.messages[make] = make(self)
        return next(self.messages[make])

    def prepare(self, name: str) -> Prepared:
        """Return what an attack prepares by *name*."""
        return self.prepared.setdefault(name, Prepared())

    async def read_answer(self, address: str, content: bytes) -> bytes:
        """Send *content* at once and read the answer to its end; return its beginning."""
        async with connected(address, self.port) as (reader, writer):
            sending = asyncio.create_task(_send(writer, content))
            try:
                return await _read(reader)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def ask(self, address: str, content: bytes) -> str:
        """As read_answer(); return status and error code in words."""
        return status_of(await self.read_answer(address, content))

    async def ask_chat(self, address: str, body: bytes) -> str:
        """Send a chat."""
        return await self.ask(address, self.message(body))

    async def ask_for(self, address: str, *paths: str) -> str:
        """Send a chat that names images at the hosts."""
        urls = [self.hosts.url(path, next(self.serial)) for path in paths]
        return await self.ask_chat(address, payloads.chat(self.model, payloads.image_parts(*urls), max_tokens=1))

    async def drip(self, address: str, start: bytes, pieces: Iterable[bytes], seconds: float) -> str:
        """Send *start*, then a piece every few *seconds*, until the server answers or closes."""
        async with connected(address, self.port) as (reader, writer):
            writer.write(start)
            answer = b""
            for piece in pieces:
                with contextlib.suppress(TimeoutError):
                    data = await asyncio.wait_for(reader.read(4096), seconds)
                    answer += data
                    # The body of an answer may come after its head.
                    if not data or b"}" in answer:
                        return status_of(answer)
                if not answer:
                    writer.write(piece)
                    await writer.drain()
        return "done"

    async def leave_unread(self, address: str, content: bytes) -> str:
        """Send *content* and read nothing; the client sees the end only in the socket's state."""
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            connection.bind((address, 0))
            await loop.sock_connect(connection, (HOST, self.port))
            await loop.sock_sendall(connection, content)
            answer = b""
            while connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED:
                await asyncio.sleep(0.5)
                with contextlib.suppress(BlockingIOError):
                    answer = connection.recv(12, socket.MSG_PEEK)
        return f"{status_of(answer)}, then cut off" if b" 200" in answer else status_of(answer)

    async def leave(self, address: str, content: bytes) -> None:
        """Send *content* whole, and close the connection."""
        async with connected(address, self.port) as (_, writer):
            await _send(writer, content)
            writer.close()
            await writer.wait_closed()


def status_of(answer: bytes) -> str:
    """Return an answer's status and error code in words."""
    if not answer.startswith(b"HTTP/1.1 "):
        return "closed without an answer"
    code = CODE.search(answer.partition(b"\r\n\r\n")[2][:4096])
    status = answer[9:12].decode("latin-1")
    return f"{status} {code[1].decode()}" if code and status != "200" else status


@contextlib.asynccontextmanager
async def connected(address: str, port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect from *address*; the connection is gone when the block ends."""
    reader, writer = await asyncio.open_connection(HOST, port, local_addr=(address, 0))
    try:
        yield reader, writer
    finally:
        if not writer.is_closing():
            writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(OSError):
        writer.write(content)
        await writer.drain()


async def _read(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(ANSWER_BYTES):
            answer = (answer + data)[:ANSWER_BYTES]
    return answer
