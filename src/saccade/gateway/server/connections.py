"""All connections of a server: how many there may be, who holds them, and which one makes room for another.

All connections read into one shared buffer. The limits of a single connection are in connection.py.
"""

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any, cast

from saccade.errors import QueueFull
from saccade.gateway.config import ConnectionLimits
from saccade.gateway.memory_parts import MemoryPart
from saccade.gateway.server.answer_framing import refusal
from saccade.gateway.server.answer_memory import PIECE_BYTES
from saccade.gateway.server.client_address import client_key
from saccade.gateway.server.connection import READ_BYTES, TOO_MANY, UNSENT_BYTES, Connection

OTHER_DESCRIPTORS = 256
"""File descriptors other than client connections: workers, decode processes, fetches, files."""

FULL_SECONDS = 0.1
"""After a look at all connections that found no place, newcomers cause no further one for so long."""

TOO_MANY_OF_TENANT = "Your share of the server's connections is used up; use open ones again, or close some."

Holder = str | bytes | None
"""Who holds a connection: an address, or the tenant of its last valid key. Nobody holds a trusted peer's without a key.
"""


class Connections:
    """Creates and counts a server's connections, and checks their deadlines. All read into one shared buffer.

    A connection counts towards its address until a valid key arrives, then towards its tenant. Connections of trusted
    peers do not count towards an address, since a proxy has many clients.

    A connection over *max_connections* replaces one without a request. If there is none, the largest holder loses its
    slowest connection among those that keep the server waiting. If there is none of those either, the new connection
    may only ask for one of *probes*, the paths that orchestrators poll. A few such connections are allowed; the newest
    stay, since a probe is answered at once.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        is_trusted: Callable[[str], bool] = lambda _: False,
        probes: Collection[str] = (),
    ) -> None:
        self.limits = limits
        self.num_refused = 0
        self._is_trusted = is_trusted
        self._probes = probes
        self._memory = memoryview(bytearray(READ_BYTES))
        self._open: dict[Connection, Holder] = {}
        self._probing: dict[Connection, None] = {}
        self._num_held: Counter[str | bytes] = Counter()
        self._full_until = 0.0
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of answers that wait to be sent, in all connections."""
        return sum(connection.transport.get_write_buffer_size() for connection in tuple(self._open))

    @property
    def memory_part(self) -> MemoryPart:
        """The answer bytes that the connections hold.

        While UNSENT_BYTES wait, one more piece of an answer may still be added.
        """
        bound = self.limits.max_connections * (UNSENT_BYTES + 2 * PIECE_BYTES)
        return MemoryPart("connections", bound, lambda: self.num_unsent_bytes)

    def __call__(self, *arguments: Any, **settings: Any) -> asyncio.BufferedProtocol:
        """Return the protocol of a new connection; *arguments* and *settings* are uvicorn's."""
        return _Reader(self, Connection(self, *arguments, **settings), self._memory)

    def admit(self, connection: Connection, transport: asyncio.Transport) -> None:
        """Count a connection. Raises QueueFull if its address has too many, or if there is no room even for a probe."""
        peer = transport.get_extra_info("peername")
        host = peer[0] if isinstance(peer, tuple) else None
        address = None if host is None or self._is_trusted(host) else client_key(host)
        try:
            if address is not None and self._num_held[address] >= self.limits.max_per_address:
                raise QueueFull("Too many connections come from this address; try again shortly.")
            if not self._find_room():
                self._make_room_for_probe(connection)
        except QueueFull:
            self.num_refused += 1
            raise
        self._hold(connection, address)
        if self._sweeping is None:
            self._sweep_later()

    def takes(self, connection: Connection, path: str) -> bool:
        """Return whether *connection* may ask for *path*."""
        if connection not in self._probing or path in self._probes:
            return True
        if self._find_room():
            del self._probing[connection]
            return True
        self.num_refused += 1
        return False

    def mark_authenticated(self, connection: Connection, tenant: bytes) -> None:
        """Count *connection* towards *tenant*. Raises QueueFull if the tenant already has its share of connections."""
        if connection not in self._open or self._open[connection] == tenant:
            return
        num_own = self._num_held[tenant]
        num_left = self.limits.max_connections - (self._num_ordinary - 1 - num_own)
        if num_own >= max(1, self.limits.tenant_share * num_left) and not self._close_idle(tenant):
            self.num_refused += 1
            raise QueueFull(TOO_MANY_OF_TENANT)
        self._hold(connection, tenant)

    def leave(self, connection: Connection) -> None:
        """Stop counting *connection*, which has closed."""
        self._hold(connection, None)
        self._open.pop(connection, None)
        self._probing.pop(connection, None)

    @property
    def _num_ordinary(self) -> int:
        """The number of connections that may ask for more than probes."""
        return len(self._open) - len(self._probing)

    def _hold(self, connection: Connection, holder: Holder) -> None:
        """Count *connection* towards *holder* instead of its previous holder."""
        before = self._open.get(connection)
        if before is not None:
            self._num_held[before] -= 1
            if not self._num_held[before]:
                del self._num_held[before]
        self._open[connection] = holder
        if holder is not None:
            self._num_held[holder] += 1

    def _find_room(self) -> bool:
        """Return whether there is a place for another connection; if necessary, close one that can go."""
        if self._num_ordinary < self.limits.max_connections:
            return True
        now = asyncio.get_running_loop().time()
        if now < self._full_until:
            return False
        if self._close_idle() or self._close_slowest(now):
            return True
        self._full_until = now + FULL_SECONDS
        return False

    def _make_room_for_probe(self, connection: Connection) -> None:
        """Let *connection* ask for *probes*, in place of the oldest such connection.

        Raises QueueFull if there is no place.
        """
        if not (self.limits.num_for_probes and self._probes):
            raise QueueFull(TOO_MANY)
        if len(self._probing) >= self.limits.num_for_probes:
            oldest = next(iter(self._probing))
            self.leave(oldest)
            oldest.transport.abort()
        self._probing[connection] = None

    def _close_idle(self, holder: Holder = None) -> bool:
        """Close the oldest connection without a request, of *holder* if it is set. Return False if there is none."""
        idle = (one for one, its in self._open.items() if one.can_go and holder in (None, its))
        oldest = next((one for one in idle if one not in self._probing), None)
        if oldest is not None:
            self.leave(oldest)
            oldest.transport.abort()
        return oldest is not None

    def _close_slowest(self, now: float) -> bool:
        """Close the largest holder's slowest connection that keeps the server waiting.

        Return False if there is none.
        """
        if not self._num_held:
            return False
        [(largest, _)] = self._num_held.most_common(1)
        candidates = [one for one, holder in self._open.items() if holder == largest and one not in self._probing]
        rates = {one: rate for one in candidates if (rate := one.bytes_per_second(now)) is not None}
        if rates:
            slowest = min(rates, key=rates.__getitem__)
            self.leave(slowest)
            slowest.make_room()
        return bool(rates)

    def _sweep_later(self) -> None:
        self._sweeping = asyncio.get_running_loop().call_later(self.limits.sweep_seconds, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = None
        now = asyncio.get_running_loop().time()
        for connection in tuple(self._open):
            connection.check_deadlines(now)
            if connection.on_sweep is not None:
                connection.on_sweep()
        if self._open:
            self._sweep_later()


class _Reader(asyncio.BufferedProtocol):
    """Provides the buffer and forwards events to a Connection; refuses and closes a connection over the limits."""

    def __init__(self, connections: Connections, connection: Connection, memory: memoryview) -> None:
        self._connections = connections
        self._connection = connection
        self._is_refused = False
        self._memory = memory
        self._data_received: Callable[[bytes], None] = connection.data_received
        for event in ("eof_received", "pause_writing", "resume_writing"):
            setattr(self, event, getattr(connection, event))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        try:
            self._connections.admit(self._connection, stream)
        except QueueFull as error:
            self._is_refused = True
            stream.write(refusal(error))
            stream.close()
        else:
            self._connection.connection_made(stream)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_refused:
            self._connections.leave(self._connection)
            self._connection.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory[: self._connection.num_read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        if not self._is_refused:
            self._data_received(bytes(self._memory[:nbytes]))


def allow_descriptors(max_connections: int) -> int:
    """Raise this process's limit on open files as far as allowed; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    goal = max_connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < goal:
        soft = goal if hard == resource.RLIM_INFINITY else min(goal, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_connections if soft == resource.RLIM_INFINITY else max(1, min(max_connections, soft - OTHER_DESCRIPTORS))
