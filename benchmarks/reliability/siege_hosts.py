"""Image hosts of a siege: they accept and never answer, drip, or stall behind their headers."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from benchmarks.measured import free_ports

ADDRESSES = tuple(f"127.0.2.{number}" for number in range(1, 9))
ANNOUNCED_BYTES = 1 << 20
DRIP_SECONDS = 1.0


@dataclass
class Hosts:
    """The hosts on ADDRESSES, all at one port, and how many connections they saw and have open, by path."""

    port: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    open_now: Counter[str] = field(default_factory=Counter)
    open_at_most: Counter[str] = field(default_factory=Counter)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def url(self, path: str, number: int) -> str:
        """Return the URL of an image on one of the hosts."""
        return f"http://{ADDRESSES[number % len(ADDRESSES)]}:{self.port}/{path}/{number}.png"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do to one connection what its path says, until the other side closes it."""
        if task := asyncio.current_task():
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            path = (await reader.readuntil(b"\r\n\r\n")).split(b"/")[1].decode()
            self.seen[path] += 1
            self.open_now[path] += 1
            self.open_at_most[path] = max(self.open_at_most[path], self.open_now[path])
            try:
                await self._answer(path, reader, writer)
            finally:
                self.open_now[path] -= 1
        writer.transport.abort()

    async def _answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path == "missing":
            writer.write(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            return
        if path in ("drip", "stall"):
            writer.write(b"HTTP/1.1 200 X\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n" % ANNOUNCED_BYTES)
        while not reader.at_eof():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1), DRIP_SECONDS)
            if path == "drip":
                writer.write(b"\x89")
                await writer.drain()


@contextlib.asynccontextmanager
async def hosting() -> AsyncIterator[Hosts]:
    """Serve on all of ADDRESSES until the block ends."""
    hosts = Hosts(free_ports(1)[0])
    listener = await asyncio.start_server(hosts.serve, ADDRESSES, hosts.port)
    try:
        yield hosts
    finally:
        listener.close()
        for task in hosts.tasks:
            task.cancel()
        await asyncio.gather(*hosts.tasks, return_exceptions=True)
