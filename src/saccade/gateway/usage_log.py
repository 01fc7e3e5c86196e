"""UsageLog: what tenants have used since it was last written to the database, by model and day."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from saccade.protocol.gateway_calls import TenantUsage

MAX_ROWS: Final = 10_000
"""Rows in memory; further ones are summed as UNATTRIBUTED."""

UNATTRIBUTED: Final = b"unattributed"
"""In place of a tenant's id, which is empty or has 16 bytes."""

DAY_SECONDS: Final = 24 * 3600


class UsageKey(NamedTuple):
    """Whose usage, of which model, on which day (UTC, in days since 1970). *model* is "" if a request has none."""

    tenant: bytes
    model: str
    day: int


class UsageLog:
    """Collects usage until it is taken. *clock* returns seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._rows: dict[UsageKey, TenantUsage] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, tenant: bytes, model: str) -> TenantUsage:
        """Return the usage of today to add to; do not keep it."""
        today = int(self._clock()) // DAY_SECONDS
        key = UsageKey(tenant, model, today)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MAX_ROWS:
                key = UsageKey(UNATTRIBUTED, "", today)
            row = self._rows.setdefault(key, TenantUsage())
        return row

    def take(self) -> dict[UsageKey, TenantUsage]:
        """Return all rows, and begin with none."""
        rows, self._rows = self._rows, {}
        return rows
