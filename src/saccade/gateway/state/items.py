"""Items, which are what clients have stored: files and responses."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from saccade.gateway.state.connection import Connection
from saccade.gateway.state.contents import Contents
from saccade.gateway.state.database import Database
from saccade.gateway.state.keys import StateKeys
from saccade.gateway.state.room import Quotas, delete_expired
from saccade.gateway.state.rows import CHAIN, ItemRow, Place, delete_items, insert_item, touch_chain

ROW_BYTES: Final = 256
"""What an item takes in the tables and their indexes besides its contents."""

MAX_CHAIN: Final = 2048
"""Items of the longest chain."""

HEAD, BODY = b"head", b"body"


@dataclass(frozen=True)
class Item:
    """What a client has stored under the id *known_as*: a *head*, which is also shown alone, and a *body*.

    It is kept until *expires_at*, in seconds since 1970. It may continue the item with the id *previous*.
    """

    known_as: str
    head: bytes
    body: bytes
    expires_at: int
    previous: str | None = None

    @property
    def num_bytes(self) -> int:
        """How much it counts against the quotas."""
        return len(self.head) + len(self.body) + ROW_BYTES


@dataclass(frozen=True)
class Chain:
    """The *bodies* of an item and of those that it continues, the last one first.

    *is_long* says that there are more than MAX_CHAIN, or more bytes than the caller takes. *is_whole* says that the
    first one continues nothing.
    """

    bodies: list[bytes]
    is_long: bool
    is_whole: bool


@dataclass(frozen=True)
class Items:
    """Keeps the items of all tenants in *database*. No method finds another tenant's item.

    *clock* returns nanoseconds since 1970. All methods raise StoreUnavailable.
    """

    database: Database
    keys: StateKeys
    contents: Contents
    quotas: Quotas
    clock: Callable[[], int] = time.time_ns

    def now(self) -> int:
        """Return the time in seconds since 1970."""
        return self.clock() // 10**9

    async def put(self, tenant: bytes, kind: int, item: Item) -> bool:
        """Store *item*, in place of one with the same id. Return whether there is room for it."""
        if item.num_bytes > self.quotas.largest_item:
            return False
        now = self.clock()
        place = self._place(tenant, kind, item.known_as)
        previous = None if item.previous is None else self._place(tenant, kind, item.previous)

        def put(connection: Connection) -> bool:
            row = ItemRow(
                previous=None if previous is None else previous.name,
                used=now // 1000,
                expires=item.expires_at,
                num_bytes=item.num_bytes,
                head=self.contents.seal(tenant, place.name + HEAD, item.head),
                body=self.contents.seal(tenant, place.name + BODY, item.body),
            )
            insert_item(connection, place, row)
            if previous is not None:
                touch_chain(connection, previous, now // 10**9, row, MAX_CHAIN)
            return self.quotas.are_exceeded(connection, place.tenant)

        if not await self.database.write(put):
            return True
        return place not in await self.database.write(self.quotas.make_room)

    async def find(self, tenant: bytes, kind: int, known_as: str) -> tuple[bytes, bytes] | None:
        """Return the head and the body of an item, or None if it is not there."""
        place = self._place(tenant, kind, known_as)

        def find(connection: Connection) -> tuple[bytes, bytes] | None:
            for head, body in connection.rows(
                tuple[bytes, bytes],
                "select head, body from item where tenant = ? and kind = ? and id = ? and expires > ?",
                *(*place, self.now()),
            ):
                return (
                    self.contents.open(tenant, place.name + HEAD, head),
                    self.contents.open(tenant, place.name + BODY, body),
                )
            return None

        return await self.database.read(find)

    async def head(self, tenant: bytes, kind: int, known_as: str) -> bytes | None:
        """Return the head of an item, or None if it is not there."""
        place = self._place(tenant, kind, known_as)

        def find(connection: Connection) -> bytes | None:
            for (head,) in connection.rows(
                tuple[bytes],
                "select head from item where tenant = ? and kind = ? and id = ? and expires > ?",
                *(*place, self.now()),
            ):
                return self.contents.open(tenant, place.name + HEAD, head)
            return None

        return await self.database.read(find)

    async def heads(self, tenant: bytes, kind: int) -> list[bytes]:
        """Return the heads of all items of *kind*, the one that was used longest ago first."""
        owner = self.keys.tenant(tenant)

        def find(connection: Connection) -> list[bytes]:
            rows = connection.rows(
                tuple[bytes, bytes],
                "select id, head from item where tenant = ? and kind = ? and expires > ? order by used, id",
                *(owner, kind, self.now()),
            )
            return [self.contents.open(tenant, name + HEAD, head) for name, head in rows]

        return await self.database.read(find)

    async def chain(self, tenant: bytes, kind: int, known_as: str, max_bytes: int) -> Chain:
        """Return an item and those that it continues. Little more than *max_bytes* of them are read."""
        place = self._place(tenant, kind, known_as)

        def find(connection: Connection) -> Chain:
            now = self.now()
            rows = connection.rows(
                tuple[bytes, bytes | None, int, bytes],
                f"{CHAIN} select item.id, item.previous, chain.total, item.body "  # noqa: S608
                "from chain join item on item.id = chain.id where item.tenant = ? and item.kind = ? "
                "order by chain.depth",
                *(*place, now, place.tenant, kind, now, MAX_CHAIN, max_bytes, place.tenant, kind),
            )
            bodies = [self.contents.open(tenant, name + BODY, body) for name, _, _, body in rows]
            if not rows:
                return Chain([], is_long=False, is_whole=False)
            _, previous, total, _ = rows[-1]
            return Chain(bodies, is_long=len(rows) > MAX_CHAIN or total > max_bytes, is_whole=previous is None)

        return await self.database.read(find)

    async def delete(self, tenant: bytes, kind: int, known_as: str) -> bool:
        """Delete an item. Return whether it was there."""
        place = self._place(tenant, kind, known_as)

        def delete(connection: Connection) -> bool:
            there = connection.rows(
                tuple[int],
                "select kind from item where tenant = ? and kind = ? and id = ? and expires > ?",
                *(*place, self.now()),
            )
            return bool(there and delete_items(connection, [place]))

        return await self.database.write(delete)

    async def sweep(self) -> None:
        """Delete expired items."""
        while await self.database.write(lambda connection: delete_expired(connection, self.now())):
            pass

    def _place(self, tenant: bytes, kind: int, known_as: str) -> Place:
        return Place(self.keys.tenant(tenant), kind, self.keys.item(tenant, kind, known_as))
