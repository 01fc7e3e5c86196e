"""The directory of a fleet on Ray: which workers there are, by role.

It is the ingress of the fleet's application, so Ray Serve keeps it running, and it ends with the fleet. It has no state
that must survive: every replica renews its entry, so that a new directory knows all of them within a lease.
"""

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

LEASE_SECONDS = 15.0
"""An entry that is not renewed for this time is dropped: its replica is gone."""

RENEW_SECONDS = 2.0
"""Between two renewals."""


class Listing(NamedTuple):
    """The workers' urls by role. A directory that is younger than a lease may lack some, so it is not *complete*."""

    urls: Mapping[str, tuple[str, ...]]
    complete: bool


class _Entry(NamedTuple):
    """What is known about a worker: its role, and when its lease ends, in seconds of the clock."""

    role: str
    ends_at: float


class Directory:
    """The entries of a fleet's replicas. *roles* are the applications of the roles, which Serve deploys with it."""

    def __init__(self, *roles: object, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._complete_at = now() + LEASE_SECONDS
        self._entries: dict[str, _Entry] = {}

    async def renew(self, role: str, url: str) -> None:
        """List the worker at *url* for LEASE_SECONDS from now."""
        self._entries[url] = _Entry(role, self._now() + LEASE_SECONDS)

    async def leave(self, url: str) -> None:
        """Drop the worker at *url*, which is about to drain."""
        self._entries.pop(url, None)

    async def list_workers(self) -> Listing:
        """Return the workers, in the order of their first entry."""
        now = self._now()
        self._entries = {url: entry for url, entry in self._entries.items() if entry.ends_at > now}
        urls: dict[str, tuple[str, ...]] = {}
        for url, entry in self._entries.items():
            urls[entry.role] = (*urls.get(entry.role, ()), url)
        return Listing(urls, now >= self._complete_at)
