"""What tests of the database's items share: a clock, and items in a database that is migrated."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from saccade.gateway.state.connection import Server
from saccade.gateway.state.contents import Contents, EncryptedContents, PlainContents
from saccade.gateway.state.database import Database
from saccade.gateway.state.items import Item, Items
from saccade.gateway.state.keys import StateKeys
from saccade.gateway.state.room import Quotas
from saccade.gateway.state.schema import migrate

KEYS = StateKeys(bytes(32))
PLENTY = Quotas(1 << 30, 1 << 30, 1000)
START = 1_800_000_000


class Clock:
    """Nanoseconds since 1970. Each look is a millisecond after the one before."""

    def __init__(self) -> None:
        self.nanoseconds = START * 10**9

    def __call__(self) -> int:
        self.nanoseconds += 10**6
        return self.nanoseconds

    def pass_seconds(self, seconds: float) -> None:
        self.nanoseconds += int(seconds * 10**9)


@asynccontextmanager
async def opened(
    server: Server, quotas: Quotas = PLENTY, *, is_encrypted: bool = False, clock: Clock | None = None
) -> AsyncIterator[Items]:
    """Items in the database on *server*."""
    database = Database(server)
    contents: Contents = EncryptedContents(KEYS) if is_encrypted else PlainContents()
    await database.prepare(lambda connection: migrate(connection, KEYS.check, is_encrypted))
    try:
        yield Items(database, KEYS, contents, quotas, clock or Clock())
    finally:
        await asyncio.to_thread(database.close)


def item(known_as: str, body: bytes = b"body", seconds: int = 1000, previous: str | None = None) -> Item:
    return Item(known_as, f"head of {known_as}".encode(), body, START + seconds, previous)
