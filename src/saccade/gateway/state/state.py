"""The gateway's database, from its start to its end."""

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from saccade.errors import StartupError, StoreUnavailable, cause
from saccade.gateway.state.connection import DatabaseFailed
from saccade.gateway.state.contents import EncryptedContents, PlainContents
from saccade.gateway.state.database import Database
from saccade.gateway.state.items import Items
from saccade.gateway.state.keys import read_key_file
from saccade.gateway.state.postgres import PostgresServer
from saccade.gateway.state.room import Quotas
from saccade.gateway.state.schema import migrate
from saccade.gateway.state.settings import StateSettings
from saccade.gateway.state.sqlite import SqliteFolder
from saccade.transport import lasting_task

KEY_FILE_NAME: Final = "state.key"
SWEEP_SECONDS: Final = 60.0


class State(Collector):
    """A database, in which *items* keeps what clients store. Collects its metrics."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self._database = items.database
        self._sweeping: asyncio.Task[None] | None = None

    @classmethod
    def of_settings(cls, settings: StateSettings, tenant_files: int) -> Self | None:
        """Return the database of *settings*, which is not open yet, or None if they name none.

        A tenant may have *tenant_files* in it. Raises StartupError if a setting is wrong.
        """
        if (location := settings.location) is None:
            return None
        server = PostgresServer(location) if settings.is_postgres else SqliteFolder(Path(location))
        keys = read_key_file(settings.key_file or Path(location, KEY_FILE_NAME))
        contents = EncryptedContents(keys) if settings.is_encrypted else PlainContents()
        quotas = Quotas(settings.max_tenant_bytes, settings.max_bytes, tenant_files)
        return cls(Items(Database(server), keys, contents, quotas))

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
        self._sweeping = lasting_task.begin(self._sweep, "expiry of stored items")

    async def close(self) -> None:
        """Finish what has begun, and close the connections."""
        await lasting_task.end(self._sweeping)
        await asyncio.to_thread(self._database.close)

    def collect(self) -> Iterable[Metric]:
        """Yield whether the database answers, and how often it did not."""
        yield GaugeMetricFamily(
            "saccade_state_up", "Whether the state database could be written to last.", value=not self.is_away
        )
        yield CounterMetricFamily(
            "saccade_state_failures", "Failures of the state database.", value=self._database.num_failures
        )

    async def _sweep(self) -> None:
        while True:
            # A failure is logged, and counted.
            with contextlib.suppress(StoreUnavailable):
                await self.items.sweep()
            await asyncio.sleep(SWEEP_SECONDS)
