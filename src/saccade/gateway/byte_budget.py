"""The memory budget that bodies and answers share."""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass

from saccade.errors import BodyTooLarge, QueueFull
from saccade.gateway.reservation import Reservation

NO_ROOM = "Other requests hold all memory for bodies and answers; try again shortly."

LARGEST_SHARE = 0.5
"""The share of the budget that one client may hold."""


@dataclass(frozen=True)
class _Waiter:
    """A request that holds *num_own* bytes and waits for *nbytes* more."""

    client: Hashable
    nbytes: int
    num_own: int
    granted: asyncio.Future[None]


class ByteBudget:
    """A budget of *capacity_bytes*. A client with several requests gets at most LARGEST_SHARE of it.

    A client's only request may take the whole capacity, but never more. A request waits at most *wait_seconds* for
    room.
    """

    def __init__(self, capacity_bytes: int, wait_seconds: float = 5.0) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._wait_seconds = wait_seconds
        self._client_bytes: Counter[Hashable] = Counter()
        self._waiting: deque[_Waiter] = deque()

    def reservation(self, client: Hashable = None) -> Reservation:
        """Return an empty reservation for a request from *client*."""
        return Reservation(self, client)

    async def reserve(self, client: Hashable, nbytes: int, num_own: int) -> None:
        """Wait for room, and take *nbytes* more for a request from *client* that already has *num_own*.

        Raises QueueFull if there is no room in time, and BodyTooLarge if there never can be.
        """
        needed = num_own + nbytes
        if needed > self.capacity_bytes:
            raise BodyTooLarge(f"The request takes {needed} bytes of memory; all together get {self.capacity_bytes}.")
        waiter = _Waiter(client, nbytes, num_own, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await waiter.granted
        except BaseException as error:
            # The grant may have come in the same round of the loop as the deadline or the cancellation.
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.give_back(client, nbytes)
            else:
                self._waiting.remove(waiter)
                self._grant()
            if isinstance(error, TimeoutError):
                raise QueueFull(NO_ROOM) from error
            raise

    def claim(self, client: Hashable, nbytes: int) -> None:
        """Take *nbytes* for data of *client* that already exists, such as an answer, and so cannot wait for room.

        Raises QueueFull if there is no room or *client* would exceed its share, and BodyTooLarge if there never can be
        room.
        """
        if nbytes > self.capacity_bytes:
            raise BodyTooLarge(f"This takes {nbytes} bytes of memory; all together get {self.capacity_bytes}.")
        num_own = self._client_bytes[client]
        if num_own and num_own + nbytes > self.capacity_bytes * LARGEST_SHARE:
            raise QueueFull("Your requests hold half of all memory; read their answers, then send this again.")
        if self.num_bytes + nbytes > self.capacity_bytes:
            raise QueueFull(NO_ROOM)
        self.take_bytes(client, nbytes)

    def is_over(self, client: Hashable) -> bool:
        """Return whether *client*, or all clients together, hold more than they may."""
        return self.num_bytes > self.capacity_bytes or self._client_bytes[client] > self.capacity_bytes * LARGEST_SHARE

    def take_bytes(self, client: Hashable, nbytes: int) -> None:
        """Count *nbytes* for *client* at once, even if there is no room."""
        self.num_bytes += nbytes
        self._client_bytes[client] += nbytes

    def give_back(self, client: Hashable, nbytes: int) -> None:
        """Release *nbytes* that *client* held; waiting requests get them in order of arrival."""
        self.num_bytes -= nbytes
        self._client_bytes[client] -= nbytes
        if self._client_bytes[client] <= 0:
            del self._client_bytes[client]
        self._grant()

    def _is_at_share(self, waiter: _Waiter) -> bool:
        client_bytes = self._client_bytes[waiter.client]
        return client_bytes > waiter.num_own and client_bytes + waiter.nbytes > self.capacity_bytes * LARGEST_SHARE

    def _grant(self) -> None:
        """Grant bytes in order of arrival. A client that has used up its share delays only its own requests."""
        # Not a FairQueue: that gives turns to the client that is served least, and a turn there has its weight once.
        # Here a request keeps its place, grows while it holds bytes, and a claim takes bytes out of turn.
        at_share: set[Hashable] = set()
        for waiter in list(self._waiting):
            if waiter.granted.done():
                continue
            if waiter.client in at_share or self._is_at_share(waiter):
                at_share.add(waiter.client)
            elif self.num_bytes + waiter.nbytes > self.capacity_bytes:
                return
            else:
                self._waiting.remove(waiter)
                self.take_bytes(waiter.client, waiter.nbytes)
                waiter.granted.set_result(None)
