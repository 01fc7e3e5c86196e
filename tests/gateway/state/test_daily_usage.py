"""Usage is added up in the database over all gateways, each increment once."""

import asyncio
import datetime
import random
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from databases import START, Clock
from killed_processes import lines_until_killed

from saccade.errors import StoreUnavailable
from saccade.gateway.state import database as database_module
from saccade.gateway.state import state as state_module
from saccade.gateway.state.connection import DatabaseFailed
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.state import State
from saccade.gateway.state.usage_table import SEEN_SECONDS, USAGE_DAYS, UsageRow, delete_old_usage
from saccade.gateway.usage_log import DAY_SECONDS
from saccade.protocol.gateway_calls import TenantUsage

TODAY = START // DAY_SECONDS
PROGRAM = Path(__file__).with_name("counting_process.py")


@pytest.fixture
def opening(new_location: Callable[[], str], tmp_path: Path) -> Callable[..., Any]:
    """Opens a gateway's view of one new database."""
    settings = StateSettings(new_location(), tmp_path / "key")

    @asynccontextmanager
    async def opened(clock: Clock | None = None) -> Any:
        state = State.of_settings(settings, tenant_files=10, clock=clock or Clock())
        assert state is not None
        await state.start()
        try:
            yield state
        finally:
            await state.close()

    return opened


def row(state: State, tenant: bytes, model: str, day: int = TODAY, **usage: int) -> UsageRow:
    return UsageRow(state.items.keys.tenant(tenant), model, day, TenantUsage(**usage))


async def everything(state: State) -> list[UsageRow]:
    return sorted(await state.usage_between(0, 1 << 30))


async def test_gateways_add_up_and_outlive_a_restart(opening: Callable[..., Any]) -> None:  # F20
    async with opening() as one, opening() as two:
        one.usage_log.row(b"t", "m").requests += 1
        two.usage_log.row(b"t", "m").requests += 2
        two.usage_log.row(b"t", "n").image_bytes += 1 << 40
        await two.beat()
        await two.beat()
        expected = sorted([row(one, b"t", "m", requests=3), row(one, b"t", "n", image_bytes=1 << 40)])
        assert await everything(one) == expected
        two.usage_log.row(b"t", "m").requests += 5  # is written when it ends
    async with opening() as three:
        assert row(three, b"t", "m", requests=8) in await everything(three)
        assert await three.usage_between(TODAY + 1, TODAY + 2) == []


async def test_gateways_that_were_seen_lately_are_counted(
    opening: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with opening(clock) as one:
        assert one.num_gateways == 1
        async with opening(clock):
            await one.beat()
            assert one.num_gateways == 2
        await one.beat()
        assert one.num_gateways == 1
        monkeypatch.setattr(state_module, "forget_gateway", lambda *_: None)  # as if it were killed
        async with opening(clock) as killed:
            await killed.beat()
        await one.beat()
        assert one.num_gateways == 2
        clock.pass_seconds(SEEN_SECONDS)
        await one.beat()
        assert one.num_gateways == 1


async def test_a_commit_whose_answer_is_lost_counts_once(
    opening: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opening() as state:
        state.usage_log.row(b"t", "m").requests += 1

        async def lose_answer(work: Any) -> Any:
            await write(work)
            raise StoreUnavailable("lost")

        write = state.items.database.write
        monkeypatch.setattr(state.items.database, "write", lose_answer)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await state.beat()
        monkeypatch.undo()
        state.usage_log.row(b"t", "m").requests += 10
        await state.beat()
        assert await everything(state) == [row(state, b"t", "m", requests=11)]


async def test_usage_waits_for_a_database_that_is_away(
    opening: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opening() as state:
        monkeypatch.setattr(state_module, "add_usage", lambda *_: fail())
        monkeypatch.setattr(database_module, "RETRY_SECONDS", 0.0)
        for number in range(3):
            state.usage_log.row(b"t", f"model {number}").requests += 1
            with pytest.raises(StoreUnavailable):
                await state.beat()
        metrics = {metric.name: metric.samples[0].value for metric in state.collect()}
        assert metrics["saccade_state_unwritten_usage_rows"] == 3
        monkeypatch.undo()
        assert len(await everything(state)) == 1
        assert len(await everything(state)) == 3


def fail() -> None:
    raise DatabaseFailed


async def test_old_usage_is_deleted(opening: Callable[..., Any]) -> None:
    clock = Clock()
    async with opening(clock) as state:
        state.usage_log.row(b"t", "m").requests += 1
        await state.beat()
        for after, number in ((USAGE_DAYS, 1), (USAGE_DAYS + 1, 0)):
            await state.items.database.write(lambda connection, day=TODAY + after: delete_old_usage(connection, day))
            assert len(await everything(state)) == number


def count_until_killed(location: str, key_file: Path, seconds: float) -> tuple[int, int]:
    """Kill a process that counts; return how many requests it had counted, and how many of them it had written."""
    *_, last = lines_until_killed(PROGRAM, location, str(key_file), seconds=seconds)
    counted, written = last.split()
    return int(counted), int(written)


def test_a_killed_gateway_loses_what_came_after_its_last_beat(
    new_location: Callable[[], str], tmp_path: Path
) -> None:  # F20
    location, key_file = new_location(), tmp_path / "key"
    moments = random.Random(seed := random.randrange(1 << 32))
    print(f"seed {seed}")
    least = most = 0
    for _ in range(3):
        counted, written = count_until_killed(location, key_file, moments.uniform(0, 0.2))
        least, most = least + written, most + counted

    async def read() -> int:
        state = State.of_settings(StateSettings(location, key_file), tenant_files=1)
        assert state is not None
        await state.start()
        today = (datetime.datetime.now(datetime.UTC).date() - datetime.date(1970, 1, 1)).days
        rows = await state.usage_between(today - 1, today)
        await state.close()
        return sum(one.usage.requests for one in rows)

    # The last beat may have been committed without having said so.
    assert least <= asyncio.run(read()) <= most
