"""The gateway's database, from its start to its end."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.errors import StartupError, StoreUnavailable, cause
from saccade.gateway.state.batches import delete_old_batches
from saccade.gateway.state.connection import Connection, DatabaseFailed
from saccade.gateway.state.contents import EncryptedContents, PlainContents
from saccade.gateway.state.database import Database
from saccade.gateway.state.items import Items
from saccade.gateway.state.keys import read_key_file
from saccade.gateway.state.limits import Draw, draw
from saccade.gateway.state.postgres import PostgresServer
from saccade.gateway.state.room import Quotas
from saccade.gateway.state.schema import migrate
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.sqlite import SqliteFolder
from saccade.gateway.state.usage_table import (
    UsageRow,
    add_usage,
    count_gateways,
    delete_old_usage,
    forget_gateway,
    note_gateway,
    usage_between,
)
from saccade.gateway.usage_log import DAY_SECONDS, UsageKey, UsageLog
from saccade.protocol.gateway_calls import TenantUsage
from saccade.transport import lasting_task

KEY_FILE_NAME: Final = "state.key"
SWEEP_SECONDS: Final = 60.0

BATCH_SECONDS: Final = 30 * 24 * 3600
"""A batch is kept for this time after it was created, and has ended."""

BEAT_SECONDS: Final = 5.0
"""How often a gateway writes what tenants have used. A gateway that is killed loses what came after."""


class State(Collector):
    """A database, in which *items* keeps what clients store. Collects its metrics.

    *usage_log* is written to the database every BEAT_SECONDS. *num_gateways* is how many gateway processes were seen
    in it lately, with this one. *on_beat* is called after each of these writes.
    """

    def __init__(self, items: Items) -> None:
        self.items = items
        self.usage_log = UsageLog(lambda: items.clock() / 1e9)
        self.num_gateways = 1
        self.on_beat: Callable[[], Awaitable[None]] | None = None
        self._database = items.database
        self.gateway = secrets.token_bytes(16)
        self._batch = 0
        self._sending: dict[UsageKey, TenantUsage] = {}
        self._beat_lock = asyncio.Lock()
        self._lasting: list[asyncio.Task[None]] = []

    @classmethod
    def of_settings(
        cls, settings: StateSettings, tenant_files: int, clock: Callable[[], int] = time.time_ns
    ) -> Self | None:
        """Return the database of *settings*, which is not open yet, or None if they name none.

        A tenant may have *tenant_files* in it. *clock* returns nanoseconds since 1970. Raises StartupError if a setting
        is wrong.
        """
        if (location := settings.location) is None:
            return None
        server = PostgresServer(location) if settings.is_postgres else SqliteFolder(Path(location))
        keys = read_key_file(settings.key_file or Path(location, KEY_FILE_NAME))
        contents = EncryptedContents(keys) if settings.is_encrypted else PlainContents()
        quotas = Quotas(settings.max_tenant_bytes, settings.max_bytes, tenant_files)
        return cls(Items(Database(server), keys, contents, quotas, clock))

    @property
    def is_away(self) -> bool:
        """Whether the database could not be written to when this was last tried."""
        return self._database.is_away

    async def start(self) -> None:
        """Migrate the database, and begin to delete what expires. Raises StartupError."""
        check, is_encrypted = self.items.keys.check, self.items.contents.is_encrypted
        try:
            await self._database.prepare(lambda connection: migrate(connection, check, is_encrypted))
        except DatabaseFailed as error:
            raise StartupError(f"--state: the database cannot be opened: {cause(error.__cause__ or error)}.") from error
        with contextlib.suppress(StoreUnavailable):
            await self.beat()
        self._lasting = [
            lasting_task.begin(self._sweep, "expiry of stored items"),
            lasting_task.begin(self._keep_beating, "writing of usage"),
        ]

    async def close(self) -> None:
        """Finish what has begun, write the last usage, and close the connections."""
        await lasting_task.end(*self._lasting)
        if self._lasting:
            with contextlib.suppress(StoreUnavailable):
                await self.beat()
                await self._database.write(lambda connection: forget_gateway(connection, self.gateway))
        await asyncio.to_thread(self._database.close)

    async def beat(self) -> None:
        """Write the usage since the last beat, and count the gateways. Raises StoreUnavailable.

        What could not be written is written by the next beat.
        """
        async with self._beat_lock:
            if not self._sending:
                self._batch += 1
                self._sending = self.usage_log.take()
            now, tenant = self.items.now(), self.items.keys.tenant
            rows = {UsageKey(tenant(key.tenant), key.model, key.day): usage for key, usage in self._sending.items()}

            def write(connection: Connection) -> int:
                if note_gateway(connection, self.gateway, now, self._batch):
                    add_usage(connection, rows)
                return count_gateways(connection, now)

            self.num_gateways = max(1, await self._database.write(write))
            self._sending = {}

    async def draw(
        self, tenant: bytes, draws: Sequence[tuple[int, float, float, float]]
    ) -> list[tuple[int, float, float]]:
        """Take units of the limits of the tenant with the id *tenant*; see limits.draw(). Raises StoreUnavailable."""
        name, now = self.items.keys.tenant(tenant), self.items.clock() // 1000
        wants = [Draw(*one) for one in draws]
        grants = await self._database.write_alone(lambda connection: draw(connection, name, wants, now))
        return [(one.kind, one.units, one.level) for one in grants]

    async def usage_between(self, first: int, last: int) -> list[UsageRow]:
        """Return the usage from the day *first* to the day *last*, in days since 1970, over all gateways.

        Of this gateway, everything is there. Raises StoreUnavailable.
        """
        await self.beat()
        return await self._database.read(lambda connection: usage_between(connection, first, last))

    def collect(self) -> Iterable[Metric]:
        """Yield whether the database answers, and how often it did not."""
        yield GaugeMetricFamily(
            "saccade_state_up", "Whether the state database could be written to last.", value=not self.is_away
        )
        yield CounterMetricFamily(
            "saccade_state_failures", "Failures of the state database.", value=self._database.num_failures
        )
        yield GaugeMetricFamily(
            "saccade_state_gateways", "Gateway processes that the state database has seen.", value=self.num_gateways
        )
        yield GaugeMetricFamily(
            "saccade_state_unwritten_usage_rows",
            "Rows of usage, by tenant, model and day, that are not in the state database yet.",
            value=len(self._sending) + len(self.usage_log),
        )

    async def _sweep(self) -> None:
        while True:
            # A failure is logged, and counted.
            with contextlib.suppress(StoreUnavailable):
                await self.items.sweep()
                await self._database.write(lambda connection: delete_old_batches(connection, self._batches_before()))
                await self._database.write(
                    lambda connection: delete_old_usage(connection, self.items.now() // DAY_SECONDS)
                )
            await asyncio.sleep(SWEEP_SECONDS)

    def _batches_before(self) -> int:
        return (self.items.now() - BATCH_SECONDS) * 1_000_000

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            with contextlib.suppress(StoreUnavailable):
                await self.beat()
                if self.on_beat is not None:
                    await self.on_beat()
