"""A proxy for one address: something happens when it has passed on a number of pieces, in either direction."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

PIECE_BYTES = 1 << 16


def reset() -> None:
    """Reset the connection that the piece came over."""
    raise ConnectionResetError


@dataclass
class BreakingProxy:
    """*strike* is called before the piece number *place* is passed on, from 0; -1 for none. It may raise an OSError."""

    target: str | tuple[str, int]
    """A path of a Unix socket, or a host and a port."""
    strike: Callable[[], None] = reset
    place: int = -1
    num_pieces: int = 0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def arm(self, place: int, strike: Callable[[], None]) -> None:
        """Strike at the piece number *place* from now."""
        self.place, self.strike, self.num_pieces = place, strike, 0

    @property
    def has_struck(self) -> bool:
        """Whether the piece has come."""
        return self.num_pieces > self.place >= 0

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes from a client and what its server answers, until one of them ends."""
        match self.target:
            case str(path):
                server = await asyncio.open_unix_connection(path)
            case (host, port):
                server = await asyncio.open_connection(host, port)
        writers = {writer, server[1]}
        self._writers |= writers
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, server[1]))
                both.create_task(self._pass_on(server[0], writer))
        except* OSError:
            pass
        finally:
            for one in writers:
                one.transport.abort()
            self._writers -= writers

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(PIECE_BYTES):
            self.num_pieces += 1
            if self.num_pieces - 1 == self.place:
                self.strike()
            writer.write(piece)
            await writer.drain()
        reset()

    def close(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def breaking(target: str | tuple[str, int], path: str | None = None) -> AsyncIterator[tuple[BreakingProxy, int]]:
    """Listen for *target*, at *path* or at a port of loopback; yield the proxy and its port."""
    proxy = BreakingProxy(target)
    if path is None:
        server = await asyncio.start_server(proxy.connect, "127.0.0.1", 0)
    else:
        server = await asyncio.start_unix_server(proxy.connect, path)
    try:
        yield proxy, server.sockets[0].getsockname()[1] if path is None else 0
    finally:
        server.close()
        proxy.close()
        await server.wait_closed()
