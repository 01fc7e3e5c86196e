"""One budget for the encoded bytes that all requests hold: bodies, data: URLs and fetched images.

A request reserves bytes before it reads them and gives them back as soon as it drops them. Where there is no room the
request waits in line, until a deadline: without one, two requests that wait for each other's bytes would never end.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

from saccade.errors import BodyTooLarge, QueueFull

CLIENT_SHARE = 0.5
"""The part of the budget that one client may hold."""


@dataclass(frozen=True)
class _Waiter:
    """A reservation that waits for *nbytes* beside the *num_own* that it has."""

    client: Hashable
    nbytes: int
    num_own: int
    granted: asyncio.Future[None]


class ByteBudget:
    """At most *capacity_bytes* at a time, of which one client holds at most CLIENT_SHARE.

    One request alone may have the whole capacity, whatever its client's share; nothing above it is ever granted. A
    request waits *wait_seconds* for room.
    """

    def __init__(self, capacity_bytes: int, wait_seconds: float = 5.0) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_bytes = 0
        self._wait_seconds = wait_seconds
        self._held: Counter[Hashable] = Counter()
        self._waiting: deque[_Waiter] = deque()

    def reservation(self, client: Hashable = None) -> "Reservation":
        """Return a reservation of no bytes yet, for a request of *client*."""
        return Reservation(self, client)

    async def reserve(self, client: Hashable, nbytes: int, num_own: int) -> None:
        """Take *nbytes* for a request of *client* that has *num_own*, when there is room.

        Raises QueueFull after the deadline, and BodyTooLarge where there can never be room.
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
                raise QueueFull("Other requests hold all memory for request bodies; try again shortly.") from error
            raise

    def is_over(self, client: Hashable) -> bool:
        """Whether *client*, or all clients together, hold more than they may."""
        return self.num_bytes > self.capacity_bytes or self._held[client] > self.capacity_bytes * CLIENT_SHARE

    def take(self, client: Hashable, nbytes: int) -> None:
        """Count *nbytes* of *client* at once, whether or not there is room."""
        self.num_bytes += nbytes
        self._held[client] += nbytes

    def give_back(self, client: Hashable, nbytes: int) -> None:
        """Return *nbytes* of *client*; requests that wait get them in the order of their arrival."""
        self.num_bytes -= nbytes
        self._held[client] -= nbytes
        if self._held[client] <= 0:
            del self._held[client]
        self._grant()

    def _is_at_share(self, waiter: _Waiter) -> bool:
        held = self._held[waiter.client]
        return held > waiter.num_own and held + waiter.nbytes > self.capacity_bytes * CLIENT_SHARE

    def _grant(self) -> None:
        """Grant in order of arrival. A client at its share holds up its own requests only."""
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
                self.take(waiter.client, waiter.nbytes)
                waiter.granted.set_result(None)


class Reservation:
    """The bytes of one request. A context manager: at its end all go back."""

    def __init__(self, budget: ByteBudget, client: Hashable) -> None:
        self.num_bytes = 0
        self.client = client
        self._budget = budget

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)

    async def grow(self, nbytes: int) -> None:
        """Reserve *nbytes* more, waiting for room. Raises QueueFull."""
        await self._budget.reserve(self.client, nbytes, self.num_bytes)
        self.num_bytes += nbytes

    @property
    def is_over(self) -> bool:
        """Whether more is taken than the budget allows; grow() would wait."""
        return self._budget.is_over(self.client)

    def take(self, nbytes: int) -> None:
        """Count *nbytes* more that are in memory already, such as those of a fetch that several requests shared."""
        self._budget.take(self.client, nbytes)
        self.num_bytes += nbytes

    def keep(self, nbytes: int) -> None:
        """Give back all but *nbytes*."""
        surplus = self.num_bytes - nbytes
        if surplus > 0:
            self.num_bytes = nbytes
            self._budget.give_back(self.client, surplus)
