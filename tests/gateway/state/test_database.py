"""While the database is away, callers are told at once; when it is back, the first call after a second finds it."""

import asyncio
import logging
import threading

import pytest

from saccade.errors import FileNotFound, StoreUnavailable
from saccade.gateway.state.connection import Connection, DatabaseConflict, DatabaseFailed, Server
from saccade.gateway.state.database import MAX_TRIES, NUM_READERS, RETRY_SECONDS, Database


class Seconds:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Unsteady(Server):
    """A server whose connections fail as the test says."""

    def __init__(self, num_writers: int = 1) -> None:
        self.num_writers = num_writers
        self.num_connections = self.num_closed = self.num_committed = 0
        self.failure: DatabaseFailed | None = None

    def open(self) -> Connection:
        self.fail()
        self.num_connections += 1
        return UnsteadyConnection(self)

    def fail(self) -> None:
        if self.failure is not None:
            raise self.failure


class UnsteadyConnection:
    """One of its connections."""

    def __init__(self, server: Unsteady) -> None:
        self._server = server

    def execute(self, statement: str, *values: object) -> None:
        self._server.fail()

    def rows(self, form: type, statement: str, *values: object) -> list[object]:
        self._server.fail()
        return []

    def begin(self) -> None:
        self._server.fail()

    def commit(self) -> None:
        self._server.fail()
        self._server.num_committed += 1

    def rollback(self) -> None:
        pass

    def lock(self, number: int) -> None:
        pass

    def close(self) -> None:
        self._server.num_closed += 1


def ask(connection: Connection) -> str:
    connection.execute("select 1")
    return "answered"


async def test_calls_fail_at_once_until_the_database_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    server, clock = Unsteady(), Seconds()
    database = Database(server, clock)
    assert await database.write(ask) == "answered"
    server.failure = DatabaseFailed("gone")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            with pytest.raises(StoreUnavailable):
                await database.write(ask)
        assert database.is_away
        assert database.num_failures == 1
        assert server.num_closed == server.num_connections
        server.failure = None
        with pytest.raises(StoreUnavailable):
            await database.write(ask)
        clock.now += RETRY_SECONDS
        assert await database.write(ask) == "answered"
    assert not database.is_away
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    database.close()


async def test_only_one_call_waits_for_a_database_that_hangs() -> None:
    server, clock = Unsteady(num_writers=2), Seconds()
    database = Database(server, clock)
    server.failure = DatabaseFailed("gone")
    with pytest.raises(StoreUnavailable):
        await database.write(ask)
    server.failure = None
    clock.now += RETRY_SECONDS
    is_hanging, may_end = threading.Event(), threading.Event()

    def hang(connection: Connection) -> None:
        is_hanging.set()
        may_end.wait()

    hanging = asyncio.create_task(database.write(hang))
    await asyncio.to_thread(is_hanging.wait)
    with pytest.raises(StoreUnavailable):
        await database.write(ask)
    may_end.set()
    await hanging
    assert await database.write(ask) == "answered"
    database.close()


async def test_reading_goes_on_if_only_writing_fails() -> None:
    """As on a full disk."""
    server = Unsteady()
    database = Database(server, Seconds())
    assert await database.read(ask) == "answered"
    server.failure = DatabaseFailed("full")
    with pytest.raises(StoreUnavailable):
        await database.write(ask)
    server.failure = None
    assert database.is_away
    assert await database.read(ask) == "answered"
    database.close()


async def test_a_conflict_is_tried_again_and_then_given_up() -> None:
    server = Unsteady()
    database = Database(server, Seconds())
    tries = []

    def conflict(connection: Connection, num_conflicts: int) -> int:
        tries.append(1)
        if len(tries) <= num_conflicts:
            raise DatabaseConflict
        return len(tries)

    assert await database.write(lambda connection: conflict(connection, MAX_TRIES - 1)) == MAX_TRIES
    tries.clear()
    with pytest.raises(StoreUnavailable):
        await database.write(lambda connection: conflict(connection, MAX_TRIES))
    assert not database.is_away
    assert server.num_committed == 1
    database.close()


async def test_an_error_of_the_work_keeps_the_connection() -> None:
    server = Unsteady()
    database = Database(server, Seconds())

    def refuse(connection: Connection) -> None:
        raise FileNotFound("no")

    for _ in range(3):
        with pytest.raises(FileNotFound):
            await database.write(refuse)
    assert (server.num_connections, server.num_closed) == (1, 0)
    database.close()
    assert server.num_closed == 1


async def test_reading_does_not_wait_for_a_writer(server: Server) -> None:
    database = Database(server)
    await database.prepare(lambda connection: connection.execute("create table t (a integer)"))
    may_end, is_writing = threading.Event(), threading.Event()

    def write(connection: Connection) -> None:
        connection.execute("insert into t values (1)")
        is_writing.set()
        may_end.wait()

    writing = asyncio.create_task(database.write(write))
    await asyncio.to_thread(is_writing.wait)
    for _ in range(2 * NUM_READERS):
        assert await database.read(lambda connection: connection.rows(tuple[int], "select a from t")) == []
    may_end.set()
    await writing
    assert await database.read(lambda connection: connection.rows(tuple[int], "select a from t")) == [(1,)]
    await asyncio.to_thread(database.close)


async def test_what_fails_is_undone(server: Server) -> None:
    database = Database(server)
    await database.prepare(lambda connection: connection.execute("create table t (a integer)"))

    def fail(connection: Connection) -> None:
        connection.execute("insert into t values (1)")
        connection.execute("insert into nowhere values (1)")

    with pytest.raises(StoreUnavailable):
        await database.write(fail)
    assert await database.read(lambda connection: connection.rows(tuple[int], "select a from t")) == []
    await asyncio.to_thread(database.close)
