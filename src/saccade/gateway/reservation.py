"""Reserves one request's bytes in a budget for all requests."""

from collections.abc import Hashable
from typing import Protocol, Self


class Budget(Protocol):
    """The budget that reservations take bytes from."""

    async def reserve(self, client: Hashable, nbytes: int, num_own: int) -> None:
        """Wait for room, and take *nbytes* more for a request that already has *num_own*.

        Raises QueueFull and BodyTooLarge.
        """

    def claim(self, client: Hashable, nbytes: int) -> None:
        """Take *nbytes* without waiting. Raises QueueFull and BodyTooLarge."""

    def is_over(self, client: Hashable) -> bool:
        """Return whether *client*, or all clients together, hold more than they may."""

    def take_bytes(self, client: Hashable, nbytes: int) -> None:
        """Count *nbytes* at once, even if there is no room."""

    def give_back(self, client: Hashable, nbytes: int) -> None:
        """Release *nbytes*."""


class Reservation:
    """Holds one request's bytes. As a context manager, it releases them all at the end of the block."""

    def __init__(self, budget: Budget, client: Hashable) -> None:
        self.num_bytes = 0
        self.client = client
        self._budget = budget

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)

    async def grow(self, nbytes: int) -> None:
        """Reserve *nbytes* more, waiting for room. Raises QueueFull and BodyTooLarge."""
        await self._budget.reserve(self.client, nbytes, self.num_bytes)
        self.num_bytes += nbytes

    def claim(self, nbytes: int) -> None:
        """Reserve *nbytes* more without waiting. Raises QueueFull and BodyTooLarge."""
        self._budget.claim(self.client, nbytes)
        self.num_bytes += nbytes

    @property
    def is_over(self) -> bool:
        """Whether this client, or all clients together, hold more than the budget allows."""
        return self._budget.is_over(self.client)

    def take_bytes(self, nbytes: int) -> None:
        """Count *nbytes* more that are already in memory, such as those of a shared fetch."""
        self._budget.take_bytes(self.client, nbytes)
        self.num_bytes += nbytes

    def count(self, nbytes: int) -> None:
        """Count *nbytes* that are already in memory; if *nbytes* is negative, release that many."""
        if nbytes > 0:
            self.take_bytes(nbytes)
        else:
            self.keep(self.num_bytes + nbytes)

    def keep(self, nbytes: int) -> None:
        """Release all but *nbytes*."""
        surplus = self.num_bytes - nbytes
        if surplus > 0:
            self.num_bytes = nbytes
            self._budget.give_back(self.client, surplus)
