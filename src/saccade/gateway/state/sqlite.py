"""A database in a folder, with SQLite."""

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from saccade.errors import StartupError
from saccade.gateway.state.connection import Connection, DatabaseFailed, Server, Value

T = TypeVar("T")

FILE_NAME: Final = "state.db"
BUSY_SECONDS: Final = 5.0
"""How long a writer waits for another process that writes."""

OLDEST_SQLITE: Final = (3, 35, 0)
"""The first release with RETURNING."""

SHARED_BY_HOSTS: Final = frozenset(
    {"9p", "afs", "ceph", "cifs", "coda", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs", "sshfs"}
)
"""File systems over a network. SQLite's WAL needs memory that all its processes share, and locks that work."""

MOUNTS: Final = Path("/proc/self/mountinfo")
_ESCAPED = re.compile(r"\\([0-7]{3})")


class SqliteFolder(Server):
    """The database in *folder*, which is made with mode 0700 if it is missing. Raises StartupError if it is unsafe."""

    num_writers = 1

    def __init__(self, folder: Path) -> None:
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StartupError(f"--state needs SQLite 3.35 or newer; Python has {sqlite3.sqlite_version} here.")
        file = folder / FILE_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_private = not folder.stat().st_mode & 0o077
            mounts = MOUNTS.read_text() if MOUNTS.exists() else ""
            # SQLite gives its other files the mode of this one.
            file.touch(mode=0o600)
        except OSError as error:
            raise StartupError(f"--state {folder}: cannot make or read this folder: {error.strerror}.") from error
        if not is_private:
            raise StartupError(f"--state {folder}: other users may enter this folder; run `chmod 700 {folder}`.")
        if (kind := file_system(folder.resolve(), mounts)) in SHARED_BY_HOSTS:
            raise StartupError(
                f"--state {folder}: this is a file system of the type {kind}, which several hosts share. SQLite can "
                "lose data there; name a folder on a local disk."
            )
        self._file = file

    def open(self) -> Connection:
        with failures():
            connection = sqlite3.connect(
                self._file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=64
            )
            # PostgreSQL has these functions; SQLite calls them max and min.
            connection.create_function("greatest", 2, max, deterministic=True)
            connection.create_function("least", 2, min, deterministic=True)
            # NORMAL would survive a killed process, but a loss of power could undo acknowledged writes.
            connection.execute("pragma synchronous = full")
            [(mode,)] = connection.execute("pragma journal_mode = wal").fetchall()
        if mode != "wal":
            raise DatabaseFailed(f"{self._file}: SQLite cannot use a write-ahead log on this file system")
        return SqliteConnection(connection)


class SqliteConnection(Connection):
    """A connection of Python's own library."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, *values: Value) -> None:
        with failures():
            self._connection.execute(statement, values).fetchall()

    def rows(self, form: type[T], statement: str, *values: Value) -> list[T]:
        with failures():
            rows = self._connection.execute(statement, values).fetchall()
        return msgspec.convert(rows, list[form])  # type: ignore[valid-type]

    def begin(self) -> None:
        # A transaction that reads first and then writes could fail because another one has written in between.
        self.execute("begin immediate")

    def commit(self) -> None:
        self.execute("commit")

    def rollback(self) -> None:
        with contextlib.suppress(DatabaseFailed):
            if self._connection.in_transaction:
                self.execute("rollback")

    def lock(self, number: int) -> None:
        """Do nothing: only one transaction writes at a time."""

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Raise DatabaseFailed for SQLite's errors."""
    try:
        yield
    except sqlite3.Error as error:
        raise DatabaseFailed from error


def file_system(folder: Path, mounts: str) -> str:
    """Return the type of the file system that has *folder*, an absolute path without links; "" if it is unknown.

    *mounts* has the form of /proc/self/mountinfo. Of a type such as `fuse.sshfs`, the part after the dot counts.
    """
    best, kind = -1, ""
    for line in mounts.splitlines():
        of_mount, _, of_type = line.partition(" - ")
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), of_mount.split()[4])
        # A later line covers an earlier one at the same place.
        if folder.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), of_type.split()[0].rpartition(".")[2]
    return kind
