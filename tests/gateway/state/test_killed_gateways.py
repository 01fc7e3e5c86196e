"""A process that is killed at any moment loses nothing that it has acknowledged."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from killed_processes import lines_until_killed

from saccade.errors import BatchNotFound
from saccade.gateway.apis.batches.store import LEASE_SECONDS, BatchStore
from saccade.gateway.state.rows import FILE, RESPONSE
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.state import State
from saccade.gateway.tenants.account import Account, Tenant

PROGRAM = Path(__file__).with_name("storing_process.py")
TENANTS = (b"one", b"two")
KINDS = {"file": FILE, "response": RESPONSE}
MOMENTS = 400
"""Of the first statements of a gateway on an empty database: migrations, and two or three rounds of everything."""

Said = list[list[str]]


async def check(location: str, key_file: Path, acknowledged: Said) -> None:
    """Check that everything is there, whole, and that nobody else's is."""
    # As another gateway, after the leases of the killed one.
    clock = lambda: time.time_ns() + (LEASE_SECONDS + 1) * 10**9  # noqa: E731
    state = State.of_settings(StateSettings(location, key_file), tenant_files=10_000, clock=clock)
    assert state is not None
    await state.start()
    await check_items(state, acknowledged)
    await check_batches(BatchStore(state), acknowledged)
    await state.close()


async def check_items(state: State, acknowledged: Said) -> None:
    deleted = {tuple(line[1:]) for line in acknowledged if line[0] == "deleted"}
    # The last deletion may have been made without being acknowledged.
    _, *names = [line[2] for line in acknowledged if line[:2] == ["file", "one"]][::-1] or [""]
    for what, tenant, name, *_ in acknowledged:
        if what == "deleted":
            assert await state.items.find(tenant.encode(), FILE, name) is None
        if what not in KINDS or ((tenant, name) in deleted and what == "file"):
            continue
        found = await state.items.find(tenant.encode(), KINDS[what], name)
        if found is None:
            assert (what, tenant) == ("file", "one")
            assert name == names[0]
            continue
        head, body = found
        assert head == tenant.encode()
        assert body in (name.encode(), name.encode() * 20_000)
        assert await state.items.find(b"three", KINDS[what], name) is None


async def check_batches(batches: BatchStore, acknowledged: Said) -> None:
    """Check that all batches are there, and that those that have not ended have their requests and answers."""
    answers: dict[tuple[bytes, str], set[int]] = {}
    for what, tenant, name, *line in acknowledged:
        if what == "batch":
            answers[tenant.encode(), name] = set()
            assert (await batches.get(tenant.encode(), name)).id == name
            with pytest.raises(BatchNotFound):
                await batches.get(b"three", name)
        elif what == "answer":
            answers[tenant.encode(), name].add(int(line[0]))
        elif what == "ended":
            assert not (answers.pop((tenant.encode(), name)) - {0, 1, 2})
    for place, account in await batches.free({tenant: Account(Tenant(tenant)) for tenant in TENANTS}):
        lease = await batches.take(place, account)
        assert lease is not None
        tenant, name = lease.account.tenant.id, lease.batch.id
        assert await batches.source(lease) == name.encode()
        there = set(await batches.lines(lease))
        if (tenant, name) in answers:
            told = answers.pop((tenant, name))
            # The last one may be there without being acknowledged.
            assert told <= there <= told | {max(told, default=-1) + 1}
        rows = [b"%d of %b\n" % (line, name.encode()) for line in sorted(there)]
        assert await batches.answers(lease, is_error=False) == b"".join(rows)
    # The last one may have ended without that being acknowledged.
    assert len(answers) <= 1
    assert all(tenant == b"two" for tenant, _ in answers)


def moments_of(seed: int) -> random.Random:
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.ci)])
def test_nothing_acknowledged_is_lost(num_kills: int, new_location: Callable[[], str], tmp_path: Path) -> None:  # F20
    location, key_file = new_location(), tmp_path / "key"
    moments = moments_of(random.randrange(1 << 32))
    for _ in range(num_kills):
        seconds = moments.uniform(0, 0.15)
        said = [line.split() for line in lines_until_killed(PROGRAM, location, str(key_file), "0", seconds=seconds)]
        assert said
        asyncio.run(check(location, key_file, said))


@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=pytest.mark.ci)])
def test_a_kill_before_or_after_any_statement(
    num_kills: int, new_location: Callable[[], str], tmp_path: Path
) -> None:  # F20
    """In a migration, between a commit and its answer, at the renewal of a lease."""
    moments = moments_of(random.randrange(1 << 32))
    for number in range(num_kills):
        location, key_file = new_location(), tmp_path / f"key-{number}"
        moment = moments.randint(1, MOMENTS)
        print(f"moment {moment}")
        said = [line.split() for line in lines_until_killed(PROGRAM, location, str(key_file), str(moment))]
        asyncio.run(check(location, key_file, said))
