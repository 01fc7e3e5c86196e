"""The statements that change rows of items. Each counts what it changes in the tenant's row of `holding`."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from saccade.gateway.state.connection import Connection

FILE: Final = 1
RESPONSE: Final = 2
"""Kinds of items; the numbers are in the database."""

TOUCHED_PART: Final = 24
"""A continued response is marked as used again once this fraction of its time has passed: a long conversation is not
written again at each turn."""

CHAIN: Final = """with recursive chain (id, previous, depth, total) as (
    select id, previous, 1, bytes from item where tenant = ? and kind = ? and id = ? and expires > ?
    union all
    select item.id, item.previous, chain.depth + 1, chain.total + item.bytes
    from item join chain on item.id = chain.previous
    where item.tenant = ? and item.kind = ? and item.expires > ? and chain.depth <= ? and chain.total <= ?
) """
"""The beginning of a statement about an item and those that it continues. It takes tenant, kind, id and the time, then
tenant, kind, the time, and the most items and bytes. *total* is the size of an item and of those that continue it."""


class Place(NamedTuple):
    """Where an item is: the primary key of its row. Tenant and name are those of the database."""

    tenant: bytes
    kind: int
    name: bytes


class ItemRow(NamedTuple):
    """What a row has besides its place. Contents are sealed; *used* is in microseconds, *expires* in seconds."""

    previous: bytes | None
    used: int
    expires: int
    num_bytes: int
    head: bytes
    body: bytes


def insert_item(connection: Connection, place: Place, row: ItemRow) -> None:
    """Insert an item, in place of the one that is there."""
    statement = (
        "insert into item (tenant, kind, id, previous, used, expires, bytes, head, body) "
        "values (?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (tenant, kind, id) do nothing returning kind"
    )
    # Most items are new, and a statement that finds nothing to delete would cost as much as this one.
    while not connection.rows(tuple[int], statement, *place, *row):
        delete_items(connection, [place])
    count_items(connection, place, 1, row.num_bytes)


def touch_chain(connection: Connection, last: Place, now: int, row: ItemRow, max_items: int) -> None:
    """Keep the item *last* and those that it continues for as long as *row*, which continues them."""
    connection.execute(
        f"{CHAIN} update item set used = ?, expires = ? "  # noqa: S608
        "where tenant = ? and kind = ? and expires < ? and id in (select id from chain)",
        *(*last, now, last.tenant, last.kind, now, max_items, 2**62),
        *(row.used, row.expires, last.tenant, last.kind, row.expires - max(1, (row.expires - now) // TOUCHED_PART)),
    )


def delete_items(connection: Connection, places: Sequence[Place]) -> set[Place]:
    """Delete items. Return the places of those that were there."""
    deleted: dict[Place, int] = {}
    for place in places:
        for (num_bytes,) in connection.rows(
            tuple[int], "delete from item where tenant = ? and kind = ? and id = ? returning bytes", *place
        ):
            deleted[place] = num_bytes
    # All items first, then the counts in a fixed order: so no two transactions wait for each other.
    for tenant, kind in sorted({place[:2] for place in deleted}):
        sizes = [num_bytes for place, num_bytes in deleted.items() if place[:2] == (tenant, kind)]
        count_items(connection, Place(tenant, kind, b""), -len(sizes), -sum(sizes))
    return set(deleted)


def count_items(connection: Connection, place: Place, num_items: int, num_bytes: int) -> None:
    """Add to what a tenant holds of a kind."""
    connection.execute(
        "insert into holding (tenant, kind, items, bytes) values (?, ?, ?, ?) on conflict (tenant, kind) "
        "do update set items = holding.items + excluded.items, bytes = holding.bytes + excluded.bytes",
        *(place.tenant, place.kind, num_items, num_bytes),
    )
