"""Executes work on the database in threads, and gives up quickly while the database is away."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from saccade.errors import StoreUnavailable, cause
from saccade.gateway.state.connection import Connection, DatabaseConflict, DatabaseFailed, Server, transaction

T = TypeVar("T")

NUM_READERS: Final = 2
"""Threads that read."""

RETRY_SECONDS: Final = 1.0
"""After a failure, nothing is sent to the database for this time."""

MAX_TRIES: Final = 4
"""How often a transaction that conflicts with others is tried."""

logger = logging.getLogger(__name__)


class Database:
    """Executes work on connections to *server*, which it opens when it needs them.

    Reading does not wait for writing. Every method raises StoreUnavailable if the database does not answer. *clock*
    returns monotonic seconds.
    """

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._readers = _Connections(server, NUM_READERS, "reader", clock)
        self._writers = _Connections(server, server.num_writers, "writer", clock)

    @property
    def is_away(self) -> bool:
        """Whether the last write failed."""
        return self._writers.is_away

    @property
    def num_failures(self) -> int:
        """How often the database has failed."""
        return self._readers.num_failures + self._writers.num_failures

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Return the result of *work*, which only reads."""
        return await self._readers.run(work)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Return the result of *work* once what it wrote is on the disk.

        *work* runs in a transaction, and again if the transaction conflicts with another one.
        """
        return await self._writers.run(lambda connection: _committed(connection, work))

    async def write_alone(self, work: Callable[[Connection], T]) -> T:
        """Return the result of *work*, which executes one statement, without a transaction around it."""
        return await self._writers.run(work)

    async def prepare(self, work: Callable[[Connection], None]) -> None:
        """Execute *work*, which has its own transactions. Raises DatabaseFailed instead of StoreUnavailable."""
        try:
            await self._writers.run(work)
        except StoreUnavailable as error:
            failure = error.__cause__
            raise DatabaseFailed from (failure and failure.__cause__)

    def close(self) -> None:
        """Finish the work that has begun, and close all connections. Blocks."""
        self._readers.close()
        self._writers.close()


class _Connections:
    """At most *number* connections, each used by one thread at a time.

    After a failure all of them are closed. From then on, one call in RETRY_SECONDS tries the database, and the others
    fail at once, until one succeeds.
    """

    def __init__(self, server: Server, number: int, purpose: str, clock: Callable[[], float]) -> None:
        self._server = server
        self._purpose = purpose
        self._clock = clock
        self._threads = ThreadPoolExecutor(number, thread_name_prefix=f"state {purpose}")
        self._idle: deque[Connection] = deque()
        self._away_until: float | None = None
        self.num_failures = 0

    @property
    def is_away(self) -> bool:
        return self._away_until is not None

    async def run(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._attempt, work)

    def close(self) -> None:
        self._threads.shutdown()
        self._close_idle()

    def _attempt(self, work: Callable[[Connection], T]) -> T:
        if self._away_until is not None:
            if self._clock() < self._away_until:
                raise _unavailable()
            # A database that hangs keeps one call waiting, and not all.
            self._away_until = self._clock() + RETRY_SECONDS
        connection: Connection | None = None
        try:
            connection = self._take()
            result = work(connection)
        except DatabaseConflict as error:
            raise _unavailable() from error
        except DatabaseFailed as error:
            if connection is not None:
                connection.close()
                connection = None
            self._note_failure(error)
            raise _unavailable() from error
        finally:
            if connection is not None:
                self._idle.append(connection)
        if self._away_until is not None:
            self._away_until = None
            logger.info("the state database answers its %s again", self._purpose)
        return result

    def _take(self) -> Connection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._server.open()

    def _note_failure(self, error: DatabaseFailed) -> None:
        self.num_failures += 1
        if self._away_until is None:
            logger.error(
                "the state database does not answer its %s: %s", self._purpose, cause(error.__cause__ or error)
            )
        self._away_until = self._clock() + RETRY_SECONDS
        # What broke one connection has probably broken the others, and each would cost another RETRY_SECONDS.
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _committed(connection: Connection, work: Callable[[Connection], T]) -> T:
    """Return the result of *work* in a transaction. Raises DatabaseConflict after MAX_TRIES of them."""
    for number in range(MAX_TRIES):
        try:
            with transaction(connection):
                return work(connection)
        except DatabaseConflict:
            if number == MAX_TRIES - 1:
                raise
    raise AssertionError("unreachable")


def _unavailable() -> StoreUnavailable:
    return StoreUnavailable("The server's database does not answer; try again shortly.")
