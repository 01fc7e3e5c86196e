"""Limits per minute that all gateways of the database share. Each gateway draws what it then spends without asking."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from saccade.gateway.state.connection import Connection

MINUTE: Final = 60_000_000.0
"""In microseconds."""

_REFILLED: Final = (
    "least(excluded.per_minute, bucket.level + greatest(0, excluded.at - bucket.at) * excluded.per_minute / 60000000.0)"
)
_GRANTED: Final = f"least(excluded.asked, greatest(excluded.owed, {_REFILLED}))"


class Draw(NamedTuple):
    """What a gateway wants of a tenant's bucket of *kind*: at most *most* units.

    *debt* units of them were spent already, and are taken even if they are not there. A negative *most* gives units
    back.
    """

    kind: int
    per_minute: float
    most: float
    debt: float


class Grant(NamedTuple):
    """How many *units* of a bucket were granted, and its *level* now; negative if more was spent than there was."""

    kind: int
    units: float
    level: float


def draw(connection: Connection, tenant: bytes, draws: Sequence[Draw], now: int) -> list[Grant]:
    """Execute *draws* of the tenant that the database calls *tenant*, in one statement.

    *now* is in microseconds. A bucket's time never runs backwards, so clocks of hosts that disagree by seconds give
    those seconds away once.
    """
    values: list[bytes | float | int] = []
    for kind, per_minute, most, debt in sorted(draws):
        # Of a bucket that is not there yet, which is full.
        units = min(most, max(debt, per_minute))
        values += (tenant, kind, per_minute, most, debt, per_minute - units, now, units)
    return connection.rows(
        Grant,
        "insert into bucket (tenant, kind, per_minute, asked, owed, level, at, granted) "  # noqa: S608
        f"values {', '.join(['(?, ?, ?, ?, ?, ?, ?, ?)'] * len(draws))} on conflict (tenant, kind) do update set "
        "per_minute = excluded.per_minute, asked = excluded.asked, owed = excluded.owed, "
        f"level = {_REFILLED} - {_GRANTED}, at = greatest(bucket.at, excluded.at), granted = {_GRANTED} "
        "returning kind, granted, level",
        *values,
    )
