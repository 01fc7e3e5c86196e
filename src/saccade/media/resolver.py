"""Resolves host names on the event loop, so slow name servers occupy no threads. A lookup ends with its fetch.

Each lookup has a separate c-ares channel. A `getaddrinfo` in a thread cannot be cancelled, and a shared channel can
neither cancel a single lookup nor bound its cache of answers. c-ares reads /etc/hosts, /etc/resolv.conf with its search
domains, and the `hosts` line of /etc/nsswitch.conf, of which it supports `files` and `dns`.
"""

import asyncio
import socket
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import pycares
from aiohttp.abc import AbstractResolver, ResolveResult

from saccade.media.addresses import new_socket

MAX_ADDRESSES = 8
"""The most addresses per name and family: a name with thousands must not lead to as many connections."""

MAX_RECORDS = 4096
"""The most addresses of a name that the operator gives."""

_NO_SOCKET = pycares.ARES_SOCKET_BAD
_NO_SORTING = 1 << 7  # ARES_AI_NOSORT; sorting opens a socket for every address that an untrusted name server sends


@dataclass(frozen=True)
class Records:
    """A name's addresses (IPv6 only if it has no IPv4), and the shortest time to live among them, in seconds."""

    addresses: tuple[str, ...]
    seconds_to_live: int


class DnsResolver(AbstractResolver):
    """Asks the system's name servers, or *servers*, each written like `127.0.0.1:53`."""

    def __init__(self, servers: Iterable[str] = ()) -> None:
        self._servers = tuple(servers)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of *host*, IPv4 first. Raises OSError, and QueueFull if no socket is left."""
        try:
            with closing(_HostLookup(asyncio.get_running_loop(), self._servers)) as lookup:
                nodes = await lookup.addresses(host, family)
        except OSError:
            new_socket(
                socket.AF_INET, socket.SOCK_DGRAM
            ).close()  # c-ares does not report that it could not open a socket
            raise
        kinds = (socket.AF_INET, socket.AF_INET6)
        addresses = [(kind, text) for kind in kinds for text in _of_family(nodes, kind)[:MAX_ADDRESSES]]
        if not addresses:
            raise OSError("The host has no address.")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=kind,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, address in addresses
        ]

    async def records(self, host: str) -> Records:
        """Return the addresses of *host*, and how long they are valid. Raises OSError, also if there are none."""
        with closing(_HostLookup(asyncio.get_running_loop(), self._servers)) as lookup:
            nodes = await lookup.addresses(host, socket.AF_UNSPEC)
        for kind in (socket.AF_INET, socket.AF_INET6):
            if addresses := _of_family(nodes, kind)[:MAX_RECORDS]:
                return Records(tuple(addresses), min(node.ttl for node in nodes if node.family == kind))
        raise OSError("The host has no address.")

    async def close(self) -> None:
        """Do nothing: every lookup closes its own sockets."""


class _HostLookup:
    """One lookup, with its own channel and sockets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, servers: tuple[str, ...]) -> None:
        self._loop = loop
        self._sockets: set[int] = set()
        self._answer: asyncio.Future[pycares.AddrInfoResult] = loop.create_future()
        try:
            self._channel = pycares.Channel(sock_state_cb=self._watch, servers=servers or None)
        except pycares.AresError as error:
            raise OSError("The resolver cannot start.") from error

    async def addresses(self, host: str, family: int) -> list[pycares.AddrInfoNode]:
        """Return the addresses of *host*. Raises OSError."""
        try:
            self._channel.getaddrinfo(
                host,
                None,
                family=family,  # type: ignore[arg-type]
                type=socket.SOCK_STREAM,
                flags=_NO_SORTING,
                callback=self._finish,
            )
            while not self._answer.done():
                await asyncio.wait((self._answer,), timeout=self._channel.timeout())  # type: ignore[no-untyped-call]
                self._channel.process_fd(_NO_SOCKET, _NO_SOCKET)
        except (pycares.AresError, UnicodeError) as error:
            raise OSError("The host's name cannot be looked up.") from error
        return self._answer.result().nodes

    def close(self) -> None:
        """End the lookup if it still runs, and close its sockets."""
        if not self._answer.cancel():
            self._answer.exception()  # asyncio would log an exception that is never retrieved
        self._channel.cancel()
        for number in tuple(self._sockets):
            self._watch(number, False, False)
        self._channel.close()

    def _finish(self, result: pycares.AddrInfoResult | None, error: int | None) -> None:
        if self._answer.done():
            return
        if result is None or error is not None:
            self._answer.set_exception(OSError("The host's name is not known."))
        else:
            self._answer.set_result(result)

    def _watch(self, number: int, readable: bool, writable: bool) -> None:
        """Watch socket *number* for the given events; there are none when c-ares is about to close it."""
        for is_watched, add, remove, ends in (
            (readable, self._loop.add_reader, self._loop.remove_reader, (number, _NO_SOCKET)),
            (writable, self._loop.add_writer, self._loop.remove_writer, (_NO_SOCKET, number)),
        ):
            if is_watched:
                add(number, self._channel.process_fd, *ends)
            elif number in self._sockets:
                remove(number)
        if readable or writable:
            self._sockets.add(number)
        else:
            self._sockets.discard(number)


def _of_family(nodes: list[pycares.AddrInfoNode], family: int) -> list[str]:
    return list(dict.fromkeys(node.addr[0].decode("ascii") for node in nodes if node.family == family))
