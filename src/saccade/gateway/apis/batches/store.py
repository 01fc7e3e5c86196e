"""Keeps batches in the gateway's database."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from saccade.errors import BatchNotFound, ImageTooLarge, InvalidValue, QueueFull
from saccade.gateway.apis.batches.wire import Batch
from saccade.gateway.state import batches as table
from saccade.gateway.state.connection import Connection
from saccade.gateway.state.items import BODY, HEAD
from saccade.gateway.state.rows import Place
from saccade.gateway.state.state import State
from saccade.gateway.tenants.account import Account

LEASE_SECONDS: Final = 30
"""A batch whose gateway has not renewed its lease for so long goes on at another one."""


MAX_OPEN: Final = 100
"""Batches of a tenant that have not ended."""

BATCH_PART: Final = 2
"""The batches of a tenant that have not ended may take this fraction of its quota."""


@dataclass(frozen=True)
class Lease:
    """A batch of *account* at *place*, which this gateway works on."""

    place: Place
    account: Account
    batch: Batch
    is_cancelled: bool


class BatchStore:
    """Batches in the database of *state*. Coroutines raise StoreUnavailable.

    *is_new* is set when a client has created a batch here.
    """

    def __init__(self, state: State) -> None:
        self._items = state.items
        self._database = state.items.database
        self._owner = state.gateway
        self.is_new = asyncio.Event()

    def now(self) -> int:
        """Return the time in seconds since 1970."""
        return self._items.now()

    async def create(self, tenant: bytes, batch: Batch, content: bytes) -> None:
        """Store a new *batch* for the requests in *content*. Raises InvalidValue if there is no room, and QueueFull."""
        place = self._place(tenant, batch.id)
        created = self._items.clock() // 1000

        def create(connection: Connection) -> bool:
            if table.count_open(connection, place.tenant) >= MAX_OPEN:
                raise QueueFull(f"{MAX_OPEN} of your batches have not ended; wait for one, or cancel it.")
            source = self._items.contents.seal(tenant, place.name + BODY, content)
            table.insert_batch(connection, place, created, self._sealed(tenant, place, batch), source)
            if table.batch_bytes(connection, place.tenant) > self._items.quotas.largest_item // BATCH_PART:
                raise InvalidValue(
                    "`input_file_id`: your batches that have not ended take half of --state-tenant-bytes; wait for "
                    "one, or cancel it.",
                    "input_file_id",
                )
            return self._items.quotas.are_exceeded(connection, place.tenant)

        if await self._database.write(create):
            await self._database.write(self._items.quotas.make_room)
        self.is_new.set()

    async def get(self, tenant: bytes, batch_id: str) -> Batch:
        """Return a batch of *tenant*. Raises BatchNotFound."""
        place = self._place(tenant, batch_id)
        row = await self._database.read(lambda connection: table.find_batch(connection, place))
        if row is None:
            raise BatchNotFound("`batch_id`: there is no such batch, or it is not kept any longer.", "batch_id")
        return self._opened(tenant, place, row.head)

    async def list_all(self, tenant: bytes) -> list[Batch]:
        """Return all batches of *tenant*, the newest first."""
        owner = self._items.keys.tenant(tenant)
        rows = await self._database.read(lambda connection: table.list_batches(connection, owner))
        return [self._opened(tenant, Place(owner, table.BATCH, name), head) for name, head in rows]

    async def cancel(self, tenant: bytes, batch_id: str) -> Batch:
        """Cancel a batch of *tenant*, if it has not ended. Raises BatchNotFound."""
        place = self._place(tenant, batch_id)

        def cancel(connection: Connection) -> None:
            row = table.find_batch(connection, place)
            if row is not None and row.state == table.OPEN:
                batch = self._opened(tenant, place, row.head)
                batch = msgspec.structs.replace(batch, status="cancelling", cancelling_at=self.now())
                table.cancel_batch(connection, place, self._sealed(tenant, place, batch))

        await self._database.write(cancel)
        return await self.get(tenant, batch_id)

    async def free(self, accounts: Mapping[bytes, Account]) -> list[tuple[Place, Account]]:
        """Return the batches of *accounts*, by the tenant's id, that no gateway works on, the oldest first."""
        owners = {self._items.keys.tenant(tenant): account for tenant, account in accounts.items()}
        rows = await self._database.read(lambda connection: table.free_batches(connection, self.now()))
        return [(Place(tenant, table.BATCH, name), owners[tenant]) for tenant, name in rows if tenant in owners]

    async def take(self, place: Place, account: Account) -> Lease | None:
        """Take or renew the lease of a batch. Return None if another gateway has it, or it has ended."""
        now = self.now()
        row = await self._database.write(
            lambda connection: table.take_lease(connection, place, self._owner, now, now + LEASE_SECONDS)
        )
        if row is None:
            return None
        batch = self._opened(account.tenant.id, place, row.head)
        return Lease(place, account, batch, row.state == table.CANCELLED)

    async def give_back(self, lease: Lease) -> None:
        """End the lease, so that another gateway goes on at once."""
        now = self.now()
        await self._database.write(
            lambda connection: table.take_lease(connection, lease.place, self._owner, now, now - 1)
        )

    async def source(self, lease: Lease) -> bytes:
        """Return the file of the requests."""
        sealed = await self._database.read(lambda connection: table.batch_source(connection, lease.place))
        return self._items.contents.open(lease.account.tenant.id, lease.place.name + BODY, sealed)

    async def set_batch(self, lease: Lease, batch: Batch) -> None:
        """Store the progress of *batch*, unless its state is no longer that of *lease*."""
        head = self._sealed(lease.account.tenant.id, lease.place, batch)
        state = table.CANCELLED if lease.is_cancelled else table.OPEN
        await self._database.write(lambda connection: table.set_head(connection, lease.place, self._owner, state, head))

    async def end(self, lease: Lease, batch: Batch) -> None:
        """Store the end of *batch*, and delete its requests and answers."""
        head = self._sealed(lease.account.tenant.id, lease.place, batch)
        await self._database.write(lambda connection: table.end_batch(connection, lease.place, self._owner, head))

    async def put_answer(self, lease: Lease, line: int, is_error: bool, body: bytes) -> None:
        """Store the answer to a line, unless there is one."""
        sealed = self._items.contents.seal(lease.account.tenant.id, lease.place.name + b"%d" % line, body)
        await self._database.write(lambda connection: table.put_answer(connection, lease.place, line, is_error, sealed))

    async def lines(self, lease: Lease) -> dict[int, bool]:
        """Return whether the answer is an error, by the number of each line that has one."""
        return await self._database.read(lambda connection: table.lines_with_answers(connection, lease.place))

    async def answers(self, lease: Lease, is_error: bool) -> bytes:
        """Return the answers that are errors or not, one per line, in the order of the requests.

        Raises ImageTooLarge if they cannot be kept as a file; they are not read then.
        """

        def read(connection: Connection) -> list[tuple[int, bytes]]:
            if table.answer_bytes(connection, lease.place, is_error) > self._items.quotas.largest_item:
                raise ImageTooLarge("The answers are larger than --state-tenant-bytes allows.")
            return table.answers_of(connection, lease.place, is_error)

        rows = await self._database.read(read)
        tenant, name = lease.account.tenant.id, lease.place.name
        return b"".join(self._items.contents.open(tenant, name + b"%d" % line, sealed) + b"\n" for line, sealed in rows)

    def _place(self, tenant: bytes, batch_id: str) -> Place:
        keys = self._items.keys
        return Place(keys.tenant(tenant), table.BATCH, keys.item(tenant, table.BATCH, batch_id))

    def _sealed(self, tenant: bytes, place: Place, batch: Batch) -> bytes:
        return self._items.contents.seal(tenant, place.name + HEAD, msgspec.json.encode(batch))

    def _opened(self, tenant: bytes, place: Place, head: bytes) -> Batch:
        return msgspec.json.decode(self._items.contents.open(tenant, place.name + HEAD, head), type=Batch)
