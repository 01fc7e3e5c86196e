"""Deletes items that have expired or for which there is no room. Only these statements concern several tenants."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from saccade.gateway.state.connection import Connection
from saccade.gateway.state.rows import FILE, Place, delete_items

BATCH: Final = 256
"""The most items that one statement selects to be deleted, so that others do not wait for long."""

ROOM_LOCK: Final = 0x5ACCADE2
"""Held by a transaction that deletes items of several tenants, so that no two of them wait for each other."""


@dataclass(frozen=True)
class Quotas:
    """How much is kept: bytes of one tenant, bytes of all tenants together, and files of one tenant."""

    tenant_bytes: int
    all_bytes: int
    tenant_files: int

    @property
    def largest_item(self) -> int:
        """Bytes of the largest item that can be kept."""
        return min(self.tenant_bytes, self.all_bytes)

    def are_exceeded(self, connection: Connection, tenant: bytes) -> bool:
        """Return whether *tenant*, as the database names it, or all tenants together are over a quota."""
        [(own, total, files)] = connection.rows(
            tuple[int, int, int],
            "select cast(coalesce(sum(case when tenant = ? then bytes else 0 end), 0) as bigint), "
            "cast(coalesce(sum(bytes), 0) as bigint), "
            "cast(coalesce(sum(case when tenant = ? and kind = ? then items else 0 end), 0) as bigint) from holding",
            *(tenant, tenant, FILE),
        )
        return own > self.tenant_bytes or total > self.all_bytes or files > self.tenant_files

    def make_room(self, connection: Connection) -> set[Place]:
        """Delete items until no quota is exceeded, and return their places.

        A tenant over its quota loses the items that it used longest ago. If all tenants together are over theirs, the
        tenant with the most bytes does.
        """
        connection.lock(ROOM_LOCK)
        deleted: set[Place] = set()
        for tenant, num_files in connection.rows(
            tuple[bytes, int],
            "select tenant, items from holding where kind = ? and items > ? order by tenant",
            *(FILE, self.tenant_files),
        ):
            oldest = connection.rows(
                tuple[bytes, int, bytes],
                "select tenant, kind, id from item where tenant = ? and kind = ? order by used, id limit ?",
                *(tenant, FILE, num_files - self.tenant_files),
            )
            deleted |= delete_items(connection, [Place(*row) for row in oldest])
        while (over := self._most_exceeding(connection)) is not None and (places := list(_oldest(connection, *over))):
            deleted |= delete_items(connection, places)
        return deleted

    def _most_exceeding(self, connection: Connection) -> tuple[bytes, int] | None:
        """Return which tenant has to lose items, and how many bytes at least; None if no quota of bytes is exceeded."""
        holdings = connection.rows(
            tuple[bytes, int],
            "select tenant, cast(sum(bytes) as bigint) from holding group by tenant order by 2 desc, 1",
        )
        if not holdings:
            return None
        tenant, num_bytes = holdings[0]
        over = max(num_bytes - self.tenant_bytes, sum(one for _, one in holdings) - self.all_bytes)
        return (tenant, over) if over > 0 else None


def _oldest(connection: Connection, tenant: bytes, num_bytes: int) -> Iterator[Place]:
    """Yield the places of *tenant*'s items that it used longest ago, of *num_bytes* at least but at most a BATCH."""
    for kind, name, size in connection.rows(
        tuple[int, bytes, int],
        "select kind, id, bytes from item where tenant = ? order by used, id limit ?",
        *(tenant, BATCH),
    ):
        if num_bytes <= 0:
            return
        yield Place(tenant, kind, name)
        num_bytes -= size


def delete_expired(connection: Connection, now: int) -> int:
    """Delete a BATCH of items that expire before *now*, in seconds since 1970. Return how many there were."""
    connection.lock(ROOM_LOCK)
    rows = connection.rows(
        tuple[bytes, int, bytes],
        "select tenant, kind, id from item where expires <= ? order by expires limit ?",
        now,
        BATCH,
    )
    delete_items(connection, [Place(*row) for row in rows])
    return len(rows)
