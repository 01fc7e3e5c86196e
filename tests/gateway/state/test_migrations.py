"""The tables are made once, whoever comes first; another key or a newer release's database is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from saccade.errors import StartupError
from saccade.gateway.state import schema
from saccade.gateway.state.connection import DatabaseFailed, Server
from saccade.gateway.state.keys import StateKeys
from saccade.gateway.state.schema import MIGRATIONS, migrate

KEY, OTHER = (StateKeys(bytes([number]) * 32).check for number in (1, 2))


def open_database(server: Server, check: bytes = KEY, is_encrypted: bool = False) -> None:
    connection = server.open()
    try:
        migrate(connection, check, is_encrypted)
    finally:
        connection.close()


def version(server: Server) -> int:
    connection = server.open()
    [(found,)] = connection.rows(tuple[bytes], "select value from meta where name = 'version'")
    connection.close()
    return int(found)


def test_gateways_that_start_together_make_the_tables_once(server: Server) -> None:
    together = threading.Barrier(6)

    def start() -> None:
        together.wait()
        open_database(server)

    with ThreadPoolExecutor(6) as threads:
        for starting in [threads.submit(start) for _ in range(6)]:
            starting.result()
    assert version(server) == len(MIGRATIONS)


def test_a_newer_release_adds_to_the_tables(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    open_database(server)
    connection = server.open()
    connection.execute("insert into holding values (?, 1, 1, 1)", b"t")
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, ("create table more (a integer)",)))
    open_database(server)
    connection.execute("insert into more values (1)")
    assert connection.rows(tuple[int], "select items from holding") == [(1,)]
    monkeypatch.undo()
    with pytest.raises(StartupError, match="newer release"):
        open_database(server)
    connection.close()


def test_a_migration_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    open_database(server)
    broken = (*MIGRATIONS, ("create table more (a integer)", "insert into nowhere values (1)"))
    monkeypatch.setattr(schema, "MIGRATIONS", broken)
    with pytest.raises(DatabaseFailed):
        open_database(server)
    assert version(server) == len(MIGRATIONS)
    monkeypatch.setattr(schema, "MIGRATIONS", (*MIGRATIONS, ("create table more (a integer)",)))
    open_database(server)


def test_another_key_is_refused(server: Server) -> None:
    open_database(server)
    with pytest.raises(StartupError, match="--state-key-file"):
        open_database(server, OTHER)
    open_database(server)


def test_encryption_is_chosen_once(server: Server) -> None:
    open_database(server, is_encrypted=True)
    with pytest.raises(StartupError, match="pass --state-encrypt"):
        open_database(server)
    open_database(server, is_encrypted=True)


def test_contents_in_the_clear_are_not_taken_for_encrypted_ones(server: Server) -> None:
    open_database(server)
    with pytest.raises(StartupError, match="leave out --state-encrypt"):
        open_database(server, is_encrypted=True)
