"""The common buckets of a tenant in both databases: refilled by time, never backwards, and apart for each tenant."""

import asyncio

import pytest
from databases import Clock
from let_through import is_let_through

from saccade.gateway.state.connection import Server
from saccade.gateway.state.database import Database
from saccade.gateway.state.keys import StateKeys
from saccade.gateway.state.limits import Draw, Grant, draw
from saccade.gateway.state.schema import migrate
from saccade.gateway.tenants import shared_limits
from saccade.gateway.tenants.account import Account, Ledger, Limits, Tenant
from saccade.gateway.tenants.shared_limits import SharedLimits
from saccade.gateway.usage_log import UsageLog

SECOND = 1_000_000
NOW = 1_800_000_000 * SECOND


def test_units_are_drawn_refilled_owed_and_given_back(server: Server) -> None:
    connection = server.open()
    migrate(connection, StateKeys(bytes(32)).check, is_encrypted=False)

    def drawn(asked: float, owed: float = 0.0, seconds: float = 0.0, tenant: bytes = b"t") -> tuple[float, float]:
        [(kind, granted, level)] = draw(
            connection, tenant, [Draw(0, 600.0, float(asked), float(owed))], NOW + int(seconds * SECOND)
        )
        assert kind == 0
        return round(granted, 6), round(level, 6)

    assert drawn(200) == (200, 400)
    assert drawn(500) == (400, 0)
    assert drawn(10) == (0, 0)
    assert drawn(10, seconds=0.5) == (5, 0)
    # A clock that is behind gives nothing, and takes nothing back.
    assert drawn(10, seconds=0.1) == (0, 0)
    assert drawn(10, seconds=0.6) == (1, 0)
    assert drawn(70, owed=60, seconds=0.6) == (60, -60)
    assert drawn(10, seconds=3.6) == (0, -30)
    assert drawn(-100, seconds=3.6) == (-100, 70)
    assert drawn(1, seconds=1000) == (1, 599)
    assert drawn(1, tenant=b"other") == (1, 599)
    connection.close()


def test_several_buckets_are_drawn_from_in_one_statement(server: Server) -> None:
    connection = server.open()
    migrate(connection, StateKeys(bytes(32)).check, is_encrypted=False)
    for level in (60.0, 50.0):
        draws = [Draw(2, 1e15, 10.0, 0.0), Draw(0, 60.0, 10.0, 0.0)]
        assert sorted(draw(connection, b"t", draws, NOW)) == [
            Grant(0, 10.0, level - 10),
            Grant(2, 10.0, 1e15 - (10 if level == 60 else 20)),
        ]
    connection.close()


class Gateway:
    """A gateway's way to the database, with a clock of the test."""

    num_gateways = 3

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def draw(self, tenant: bytes, draws: list[tuple[int, float, float, float]]) -> list[tuple[int, float, float]]:
        now = self._clock.nanoseconds // 1000
        wanted = [Draw(*one) for one in draws]
        drawn = await self._database.write_alone(lambda connection: draw(connection, tenant, wanted, now))
        return [(one.kind, one.units, one.level) for one in drawn]


async def test_a_limit_of_600_over_three_gateways_lets_600_of_1800_through(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:  # F11, F21
    """And over 60 s at most 1,200."""
    monkeypatch.setattr(shared_limits, "DRAW_SECONDS", 600.0)  # the machine may be slow
    clock, databases = Clock(), [Database(server) for _ in range(3)]
    await databases[0].prepare(lambda connection: migrate(connection, StateKeys(bytes(32)).check, is_encrypted=False))
    tenant = Tenant(b"t" * 16, name="acme", limits=Limits(requests=600))
    accounts = [
        Account(
            tenant,
            clock=lambda: clock.nanoseconds / 1e9,
            ledger=Ledger(UsageLog(), SharedLimits(Gateway(database, clock))),
        )
        for database in databases
    ]

    total = sum(await asyncio.gather(*(is_let_through(accounts[number % 3]) for number in range(1800))))
    assert 550 <= total <= 618
    for _ in range(60):
        clock.pass_seconds(1)
        total += sum(await asyncio.gather(*(is_let_through(accounts[number % 3]) for number in range(30))))
    assert 1150 <= total <= 1218
    for database in databases:
        await asyncio.to_thread(database.close)
