"""Stores files, responses and deletions until it is killed; says each on stdout once it is acknowledged."""

import asyncio
import os
import secrets
import sys
from pathlib import Path

from saccade.gateway.state.items import Item
from saccade.gateway.state.rows import FILE, RESPONSE
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.state import State


async def store(location: str, key_file: str) -> None:
    """Store items of two tenants, each with a response that continues the one before."""
    state = State.of_settings(StateSettings(location, Path(key_file)), tenant_files=10_000)
    assert state is not None
    await state.start()
    previous: str | None = None
    while True:
        name = secrets.token_hex(8)
        for tenant in (b"one", b"two"):
            # Of a file, only a part may be written when the process is killed.
            content = name.encode() * secrets.choice((1, 20_000))
            await state.items.put(tenant, FILE, Item(name, tenant, content, 1 << 40))
            os.write(1, f"file {tenant.decode()} {name}\n".encode())
            await state.items.put(tenant, RESPONSE, Item(name, tenant, name.encode(), 1 << 40, previous))
            os.write(1, f"response {tenant.decode()} {name}\n".encode())
        if previous is not None:
            await state.items.delete(b"one", FILE, previous)
            os.write(1, f"deleted one {previous}\n".encode())
        previous = name


asyncio.run(store(*sys.argv[1:]))
