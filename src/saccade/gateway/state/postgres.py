"""A database on a PostgreSQL server, with psycopg."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from saccade.errors import NotInstalled, StartupError
from saccade.gateway.state.connection import Connection, DatabaseConflict, DatabaseFailed, Server, Value

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

DEFAULTS: Final = {
    "application_name": "saccade",
    "connect_timeout": "2",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "options": "-c statement_timeout=10s -c idle_in_transaction_session_timeout=10s",
    "tcp_user_timeout": "5000",
}
"""Settings of connections that the URL does not have: a server that is away is noticed within seconds."""


class PostgresServer(Server):
    """The database that *url* names. Raises NotInstalled and, for a malformed URL, StartupError."""

    num_writers = 4

    def __init__(self, url: str) -> None:
        if find_spec("psycopg") is None:
            raise NotInstalled("--state postgresql://... needs an extra: pip install 'saccade-vlm[postgresql]'.")
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        try:
            of_url = conninfo_to_dict(url)
        except ProgrammingError as error:
            # The library's sentence may repeat the password.
            raise StartupError(
                "--state: this is no URL of PostgreSQL; write postgresql://USER:PASSWORD@HOST/DATABASE?sslmode=verify-full."
            ) from error
        self._settings = make_conninfo("", **{**DEFAULTS, **{name: str(value) for name, value in of_url.items()}})

    def open(self) -> Connection:
        import psycopg

        with failures():
            return PostgresConnection(psycopg.connect(self._settings, autocommit=True))


class PostgresConnection(Connection):
    """A connection of psycopg, which prepares the statements that are executed often."""

    def __init__(self, connection: "psycopg.Connection") -> None:
        self._connection = connection

    def execute(self, statement: str, *values: Value) -> None:
        with failures():
            self._connection.execute(_translated(statement), values, binary=True)

    def rows(self, form: type[T], statement: str, *values: Value) -> list[T]:
        with failures():
            rows = self._connection.execute(_translated(statement), values, binary=True).fetchall()
        return msgspec.convert(rows, list[form])  # type: ignore[valid-type]

    def begin(self) -> None:
        self.execute("begin")

    def commit(self) -> None:
        self.execute("commit")

    def rollback(self) -> None:
        with contextlib.suppress(DatabaseFailed):
            self.execute("rollback")

    def lock(self, number: int) -> None:
        self.execute("select pg_advisory_xact_lock(?)", number)

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Raise DatabaseFailed or DatabaseConflict for psycopg's errors."""
    from psycopg import Error
    from psycopg.errors import DeadlockDetected, SerializationFailure, UniqueViolation

    try:
        yield
    except (DeadlockDetected, SerializationFailure, UniqueViolation) as error:
        raise DatabaseConflict from error
    except Error as error:
        raise DatabaseFailed from error


def _translated(statement: str) -> bytes:
    """Return *statement* with psycopg's placeholders. No statement of this package has a question mark otherwise."""
    return statement.replace("?", "%s").encode()
