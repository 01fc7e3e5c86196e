"""Stores files, responses, deletions and batches until it is killed; says each on stdout once it is acknowledged.

The third argument is the moment at which the process kills itself: before or after one of its statements. 0 is never.
"""

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from saccade.gateway.apis.batches import store as store_of_batches
from saccade.gateway.apis.batches.store import BatchStore
from saccade.gateway.apis.batches.wire import Batch
from saccade.gateway.state.batches import BATCH
from saccade.gateway.state.items import Item
from saccade.gateway.state.keys import StateKeys
from saccade.gateway.state.postgres import PostgresConnection
from saccade.gateway.state.rows import FILE, RESPONSE, Place
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.sqlite import SqliteConnection
from saccade.gateway.state.state import State
from saccade.gateway.tenants.account import Account, Tenant

TENANTS = (b"one", b"two")
NUM_LINES = 3


def die_at(moment: int) -> None:
    """Have the process kill itself at *moment*: each statement has one before it and one after it."""
    passed = 0

    def pass_moment() -> None:
        nonlocal passed
        passed += 1
        if passed == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            pass_moment()
            result = method(*arguments)
            pass_moment()
            return result

        return call

    for kind in (SqliteConnection, PostgresConnection):
        for name in ("execute", "rows"):
            setattr(kind, name, watched(getattr(kind, name)))


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


async def store_items(state: State, name: str, previous: str | None) -> None:
    """Store a file and a response of each tenant, and delete the file before."""
    for tenant in TENANTS:
        # Of a file, only a part may be written when the process is killed.
        content = name.encode() * secrets.choice((1, 20_000))
        await state.items.put(tenant, FILE, Item(name, tenant, content, 1 << 40))
        say("file", tenant.decode(), name)
        await state.items.put(tenant, RESPONSE, Item(name, tenant, name.encode(), 1 << 40, previous))
        say("response", tenant.decode(), name)
    if previous is not None:
        await state.items.delete(b"one", FILE, previous)
        say("deleted", "one", previous)


async def store_batch(batches: BatchStore, keys: StateKeys, name: str) -> None:
    """Work on a batch of each tenant, and end that of the second one."""
    for tenant in TENANTS:
        batch = Batch(id=name, endpoint="e", input_file_id="f", created_at=batches.now(), expires_at=1 << 40)
        await batches.create(tenant, batch, name.encode())
        say("batch", tenant.decode(), name)
        account = Account(Tenant(tenant))
        place = Place(keys.tenant(tenant), BATCH, keys.item(tenant, BATCH, name))
        for line in range(NUM_LINES):
            lease = await batches.take(place, account)
            assert lease is not None
            await batches.put_answer(lease, line, False, b"%d of %b" % (line, name.encode()))
            say("answer", tenant.decode(), name, line)
        if tenant == b"two":
            await batches.end(lease, batch)
            say("ended", tenant.decode(), name)


async def store(location: str, key_file: str, moment: str) -> None:
    """Store things of two tenants; each response continues the one before."""
    if int(moment):
        die_at(int(moment))
    state = State.of_settings(StateSettings(location, Path(key_file)), tenant_files=10_000)
    assert state is not None
    await state.start()
    batches, previous = BatchStore(state), None
    while True:
        name = secrets.token_hex(8)
        await store_items(state, name, previous)
        await store_batch(batches, state.items.keys, name)
        previous = name


# Batches of the first tenant stay open over all kills.
store_of_batches.MAX_OPEN = 1 << 30  # type: ignore[misc]
asyncio.run(store(*sys.argv[1:]))
