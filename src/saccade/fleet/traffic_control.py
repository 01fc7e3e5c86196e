"""Changes the traffic of workers while a gateway runs, for as long as it runs or in a file that outlives it."""

import asyncio
import logging
from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace
from functools import partial
from pathlib import Path

from saccade.errors import StartupError
from saccade.fleet.pool import WorkerPool
from saccade.fleet.traffic_file import Changes, TrafficFile, with_change
from saccade.transport import lasting_task

FILE_SECONDS = 1.0
"""Between two checks of the file."""

logger = logging.getLogger(__name__)


class TrafficControl:
    """Directs the traffic of *worker_pool* by changes, which win over what sources list.

    The changes are in the file at *path*, which other processes may change, too; with None they end with this process.
    """

    def __init__(self, worker_pool: WorkerPool, path: Path | None, every_seconds: float = FILE_SECONDS) -> None:
        self._worker_pool = worker_pool
        self._file = None if path is None else TrafficFile(path)
        self._every_seconds = every_seconds
        self._following: asyncio.Task[None] | None = None
        # A content that was read before a change must not replace it.
        self._turn = asyncio.Lock()

    @property
    def path(self) -> Path | None:
        """The path of the file."""
        return None if self._file is None else self._file.path

    async def start(self) -> None:
        """Apply the changes in the file and follow it until close(). Raises StartupError."""
        if self._file is not None:
            self._apply(await asyncio.to_thread(self._file.create))
            self._following = lasting_task.begin(partial(self._follow, self._file), "traffic file")

    async def close(self) -> None:
        await lasting_task.end(self._following)

    async def change(self, worker: str, fields: Mapping[str, object]) -> None:
        """Replace *fields* in the change of *worker*; None clears one. Raises StartupError if nothing was changed."""
        async with self._turn:
            if self._file is None:
                self._apply(with_change(self._worker_pool.traffic.changes, worker, fields))
            else:
                self._apply(await asyncio.to_thread(self._file.change, worker, fields))

    async def _follow(self, file: TrafficFile) -> None:
        """Apply what other processes change. If the file cannot be read, its last changes stay."""
        fault = ""
        while True:
            try:
                async with self._turn:
                    if (changes := await asyncio.to_thread(file.read_new)) is not None:
                        self._apply(changes)
                        fault = ""
            except StartupError as error:
                if error.message != fault:
                    logger.error("%s Its last changes stay.", error.message)
                fault = error.message
            await asyncio.sleep(self._every_seconds)

    def _apply(self, changes: Changes) -> None:
        # What a change begins outlives the request that asks for it, so its log lines must not have the request's id.
        Context().run(self._worker_pool.direct, replace(self._worker_pool.traffic, changes=changes))
