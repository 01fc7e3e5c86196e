"""Counts requests and writes them until it is killed. Says on stdout how many it has counted, and written at least."""

import asyncio
import os
import sys
from pathlib import Path

from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.state import State


async def count(location: str, key_file: str) -> None:
    """Write after every third request."""
    state = State.of_settings(StateSettings(location, Path(key_file)), tenant_files=1)
    assert state is not None
    await state.start()
    num_counted = num_written = 0
    while True:
        for _ in range(3):
            num_counted += 1
            os.write(1, f"{num_counted} {num_written}\n".encode())
            state.usage_log.row(b"t", "m").requests += 1
        await state.beat()
        num_written = num_counted
        os.write(1, f"{num_counted} {num_written}\n".encode())


asyncio.run(count(*sys.argv[1:]))
