"""Usage by tenant, model and day in the database, and the gateways that write it."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from saccade.gateway.state.connection import Connection
from saccade.gateway.usage_log import UsageKey
from saccade.protocol.gateway_calls import TenantUsage

USAGE_DAYS: Final = 400
"""How long usage is kept."""

SEEN_SECONDS: Final = 60
"""A gateway that has written within this time counts as running."""

FORGET_SECONDS: Final = 24 * 3600

FIELDS: Final = TenantUsage.__struct_fields__


class UsageRow(NamedTuple):
    """A tenant's usage of a model on a day. *tenant* is the database's name for it."""

    tenant: bytes
    model: str
    day: int
    usage: TenantUsage


def note_gateway(connection: Connection, gateway: bytes, now: int, batch: int) -> bool:
    """Note that *gateway* runs at *now*, in seconds since 1970. Return whether its *batch* of usage is a new one.

    A commit whose answer is lost is tried again with the same number, and must not count twice.
    """
    connection.execute(
        "insert into gateway (id, seen, batch) values (?, ?, 0) on conflict (id) do update set seen = excluded.seen",
        *(gateway, now),
    )
    connection.execute("delete from gateway where seen < ?", now - FORGET_SECONDS)
    return bool(
        connection.rows(
            tuple[int], "update gateway set batch = ? where id = ? and batch < ? returning batch", batch, gateway, batch
        )
    )


def forget_gateway(connection: Connection, gateway: bytes) -> None:
    """Note that *gateway* has ended."""
    connection.execute("delete from gateway where id = ?", gateway)


def count_gateways(connection: Connection, now: int) -> int:
    """Return how many gateways were seen in the last SEEN_SECONDS."""
    [(number,)] = connection.rows(
        tuple[int], "select cast(count(*) as bigint) from gateway where seen > ?", now - SEEN_SECONDS
    )
    return number


def add_usage(connection: Connection, rows: Mapping[UsageKey, TenantUsage]) -> None:
    """Add *rows*, whose tenants are the database's names."""
    names, sums = ", ".join(FIELDS), ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in FIELDS)
    # In a fixed order, so that no two gateways wait for each other.
    for key, usage in sorted(rows.items(), key=lambda row: row[0]):
        connection.execute(
            f"insert into usage (tenant, model, day, {names}) values (?, ?, ?, ?, ?, ?, ?, ?, ?) "  # noqa: S608
            f"on conflict (day, tenant, model) do update set {sums}",
            *key,
            *(getattr(usage, name) for name in FIELDS),
        )


def usage_between(connection: Connection, first: int, last: int) -> list[UsageRow]:
    """Return the usage of all tenants from the day *first* to the day *last*."""
    rows = connection.rows(
        tuple[bytes, str, int, int, int, int, int, int, int],
        f"select tenant, model, day, {', '.join(FIELDS)} from usage "  # noqa: S608
        "where day >= ? and day <= ? order by day, tenant, model",
        *(first, last),
    )
    return [
        UsageRow(tenant, model, day, TenantUsage(**dict(zip(FIELDS, counts, strict=True))))
        for tenant, model, day, *counts in rows
    ]


def delete_old_usage(connection: Connection, today: int) -> None:
    """Delete usage of more than USAGE_DAYS ago."""
    connection.execute("delete from usage where day < ?", today - USAGE_DAYS)
