"""A name server on loopback, for tests of what is looked up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from saccade.media.resolver import DnsResolver

A, AAAA = 1, 28


class NameServer(asyncio.DatagramProtocol):
    """Answers with *addresses* by type of question, except for names that begin with `silent`; *asked* are the names.

    If it *truncates*, every answer sends its client to TCP, where nobody listens.
    """

    def __init__(self, addresses: dict[int, list[bytes]]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []
        self.news: asyncio.Queue[str] = asyncio.Queue()
        self.port = 0
        self.seconds_to_live = 60
        self.truncates = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, source: tuple[str, int]) -> None:
        labels, end = [], 12
        while data[end]:
            labels.append(data[end + 1 : end + 1 + data[end]].decode())
            end += data[end] + 1
        self.asked.append(".".join(labels).lower())
        self.news.put_nowait(self.asked[-1])
        if labels[0].lower().startswith("silent"):
            return
        kind = int.from_bytes(data[end + 1 : end + 3], "big")
        records = [
            b"\xc0\x0c"
            + kind.to_bytes(2, "big")
            + b"\0\1"
            + self.seconds_to_live.to_bytes(4, "big")
            + len(address).to_bytes(2, "big")
            + address
            for address in (self.addresses.get(kind, []) if labels[0] != "unknown" else [])
        ]
        counts = b"\0\1" + len(records).to_bytes(2, "big") + bytes(4)
        flags = b"\x81\x83" if labels[0] == "unknown" else b"\x83\x80" if self.truncates else b"\x81\x80"
        self.transport.sendto(data[:2] + flags + counts + data[12 : end + 5] + b"".join(records), source)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def naming(
    addresses: dict[int, list[bytes]] | None = None, seconds_to_live: int = 60
) -> AsyncIterator[tuple[NameServer, DnsResolver]]:
    """Yield a name server that knows *addresses*, by default one that leads to 127.0.0.1, and a resolver that asks it."""
    server = NameServer({A: [b"\x7f\0\0\1"]} if addresses is None else addresses)
    server.seconds_to_live = seconds_to_live
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, ("127.0.0.1", 0))
    try:
        yield server, DnsResolver([f"127.0.0.1:{server.port}"])
    finally:
        transport.close()
