"""A limit holds over several gateways, with few statements; without the database, each gateway has its part."""

import asyncio
from collections.abc import Sequence

import pytest
from let_through import is_let_through

from saccade.errors import RateLimitExceeded, StoreUnavailable
from saccade.gateway.tenants import shared_limits
from saccade.gateway.tenants.account import Account, Ledger, Limits, Tenant
from saccade.gateway.tenants.shared_limits import SharedLimits
from saccade.gateway.usage_log import UsageLog

Draws = Sequence[tuple[int, float, float, float]]


class Seconds:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Store:
    """The common buckets, in memory; tests of the database's own are in gateway/state."""

    def __init__(self, clock: Seconds, num_gateways: int = 3) -> None:
        self.clock = clock
        self.num_gateways = num_gateways
        self.num_statements = 0
        self.is_away = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.limits: list[SharedLimits] = []
        self.levels: dict[int, tuple[float, float]] = {}

    async def draw(self, tenant: bytes, draws: Draws) -> list[tuple[int, float, float]]:
        self.num_statements += 1
        await asyncio.sleep(0)
        await self.answers.wait()
        if self.is_away:
            raise StoreUnavailable("away")
        answers = []
        for kind, per_minute, asked, owed in draws:
            level, at = self.levels.get(kind, (per_minute, self.clock.now))
            level = min(per_minute, level + (self.clock.now - at) * per_minute / 60)
            granted = min(asked, max(owed, level))
            self.levels[kind] = (level - granted, self.clock.now)
            answers.append((kind, granted, level - granted))
        return answers


def accounts(store: Store, number: int, **limits: int) -> list[Account]:
    tenant = Tenant(b"t" * 16, name="acme", limits=Limits(**limits))
    store.limits = [SharedLimits(store) for _ in range(number)]
    return [Account(tenant, clock=store.clock, ledger=Ledger(UsageLog(), one)) for one in store.limits]


async def num_let_through(gateways: Sequence[Account], number: int) -> int:
    return sum(await asyncio.gather(*(is_let_through(gateways[n % len(gateways)]) for n in range(number))))


async def test_a_limit_holds_over_three_gateways() -> None:  # F11, F21
    clock = Seconds()
    store = Store(clock)
    gateways = accounts(store, 3, requests=600)
    assert await num_let_through(gateways, 1800) == 600
    # Few statements were needed, and none once the limit is used up.
    assert store.num_statements < 60
    num_statements = store.num_statements
    assert await num_let_through(gateways, 300) == 0
    assert store.num_statements <= num_statements + 3
    total = 600
    for _ in range(600):
        clock.now += 0.1
        total += await num_let_through(gateways, 6)
    assert 1150 <= total <= 1200


async def test_one_busy_gateway_gets_the_whole_limit() -> None:
    store = Store(Seconds())
    busy, idle, _ = accounts(store, 3, requests=600)
    assert await is_let_through(idle)
    await idle.give_back()  # what was spent lately stays
    await idle.give_back()
    assert await num_let_through([busy], 1800) == 599


async def test_while_much_is_left_no_statement_is_executed() -> None:
    store = Store(Seconds())
    [account, *_] = accounts(store, 3, requests=600)
    assert await num_let_through([account], 1) == 1
    assert store.num_statements == 1
    assert await num_let_through([account], 149) == 149
    assert store.num_statements == 1


async def test_without_limits_no_statement_is_executed() -> None:
    store = Store(Seconds())
    [account] = accounts(store, 1)
    assert await num_let_through([account], 10) == 10
    assert store.num_statements == 0


async def test_debts_are_paid_by_all_gateways() -> None:
    clock = Seconds()
    store = Store(clock, num_gateways=2)
    one, two = accounts(store, 2, tokens=600)
    assert await is_let_through(one)
    one.use_prompt(900)
    assert await is_let_through(one) is False
    # The debt is in the database now: the other gateway knows of it.
    assert await is_let_through(two) is False
    clock.now += 29
    assert await is_let_through(two) is False
    clock.now += 2
    assert await is_let_through(two)


async def test_a_prompt_may_owe_what_the_database_has_left() -> None:
    store = Store(Seconds(), num_gateways=2)
    [one] = accounts(store, 1, tokens=600)
    assert await is_let_through(one)
    one.use_prompt(400)  # more than this gateway has drawn
    one.use_prompt(100)
    one.use_prompt(100)
    with pytest.raises(RateLimitExceeded):
        one.use_prompt(1)


async def test_while_the_store_is_away_a_gateway_has_its_part(monkeypatch: pytest.MonkeyPatch) -> None:  # F11
    clock = Seconds()
    store = Store(clock)
    [account] = accounts(store, 1, requests=600)
    limits = store.limits[0]
    store.is_away = True
    assert await num_let_through([account], 600) == 0  # what it has drawn before may be spent; this one had none
    assert limits.is_local
    total = 0
    for _ in range(600):
        clock.now += 0.1
        total += await num_let_through([account], 6)
    assert 190 <= total <= 200
    assert limits.num_local > 600
    store.is_away = False
    await is_let_through(account)
    await asyncio.sleep(0.01)
    assert not limits.is_local
    assert await num_let_through([account], 1800) > 550
    monkeypatch.setattr(shared_limits, "DRAW_SECONDS", 0.01)
    clock.now += 60
    store.answers.clear()
    assert await num_let_through([account], 600) == 0
    assert limits.is_local
    store.answers.set()


async def test_headers_say_what_is_left_of_the_whole_limit() -> None:
    store = Store(Seconds())
    [account] = accounts(store, 1, requests=600)
    assert await is_let_through(account)
    headers = {name.decode(): value.decode() for name, value in account.headers()}
    assert headers == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "100ms",
    }


async def test_changed_limits_hold_at_once() -> None:
    store = Store(Seconds())
    [account] = accounts(store, 1, requests=600)
    assert await is_let_through(account)
    account.change(Tenant(b"t" * 16, name="acme", limits=Limits(requests=6)))
    assert await num_let_through([account], 100) == 6
    account.change(Tenant(b"t" * 16, name="acme"))
    assert await num_let_through([account], 100) == 100
