"""A database on a PostgreSQL server, with psycopg."""

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from saccade.errors import NotInstalled, StartupError
from saccade.gateway.state.connection import Connection, DatabaseConflict, DatabaseFailed, Server, Value
from saccade.loopback import is_loopback

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

VERIFYING: Final = ("verify-ca", "verify-full")
"""Values of sslmode with which nobody on the network can read or change what is sent."""

logger = logging.getLogger(__name__)


class PostgresServer(Server):
    """The database that *url* names. Raises NotInstalled and, for a malformed URL, StartupError.

    A server on another host must have a certificate for its name, unless the URL has another `sslmode`: by default,
    libpq would send everything in the clear if the server, or somebody in between, does not offer TLS.
    """

    num_writers = 4

    def __init__(self, url: str) -> None:
        if find_spec("psycopg") is None:
            raise NotInstalled("--state postgresql://... needs an extra: pip install 'saccade-vlm[postgresql]'.")
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        try:
            of_url = {name: str(value) for name, value in conninfo_to_dict(url).items()}
        except ProgrammingError as error:
            # The library's sentence may repeat the password.
            raise StartupError(
                "--state: this is no URL of PostgreSQL; write postgresql://USER:PASSWORD@HOST/DATABASE?sslmode=verify-full."
            ) from error
        if not is_local(of_url):
            mode = of_url.setdefault("sslmode", os.environ.get("PGSSLMODE", "verify-full"))
            if mode not in VERIFYING:
                logger.warning(
                    "--state: somebody on the network may read and change all that is stored, because of sslmode=%s; "
                    "sslmode=verify-full prevents it",
                    mode,
                )
        self._settings = make_conninfo("", **{**DEFAULTS, **of_url})

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


def is_local(settings: Mapping[str, str]) -> bool:
    """Return whether connections with *settings* do not leave this machine."""
    hosts = settings.get("hostaddr") or settings.get("host") or os.environ.get("PGHOST", "")
    return all(_is_local_host(host) for host in hosts.split(","))


def _is_local_host(host: str) -> bool:
    # Unix sockets are named by folders, or begin with an @.
    return not host or host.startswith(("/", "@")) or is_loopback(host)


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
