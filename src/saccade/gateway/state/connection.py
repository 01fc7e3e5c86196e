"""What the statements of this package need from a database: connections, transactions, and errors that say which."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")
Value = bytes | str | int | float | None
"""A value in a row. A time is a whole number of microseconds or seconds since 1970."""


class DatabaseFailed(Exception):
    """A statement was not executed: the database is away, full or damaged. The cause is the library's error."""


class DatabaseConflict(DatabaseFailed):
    """Two transactions were in each other's way; the database has undone this one, which may be tried again."""


class Connection(Protocol):
    """A connection to the database. Only one thread uses it at a time. Every method raises DatabaseFailed."""

    def execute(self, statement: str, *values: Value) -> None:
        """Execute *statement*, in which each `?` stands for one of *values*."""

    def rows(self, form: type[T], statement: str, *values: Value) -> list[T]:
        """Execute *statement* and return its rows, each as a *form*, which is a type of tuple."""

    def begin(self) -> None:
        """Begin a transaction that may write."""

    def commit(self) -> None:
        """End the transaction. What it wrote is on the disk when this method returns."""

    def rollback(self) -> None:
        """Undo the transaction. Does nothing if the connection is lost."""

    def lock(self, number: int) -> None:
        """Within a transaction, wait until no other one holds the lock *number*, and hold it to the end."""

    def close(self) -> None:
        """Close the connection. Raises nothing."""


@contextmanager
def transaction(connection: Connection) -> Iterator[None]:
    """Execute the statements of the block together, or none of them. Raises DatabaseFailed."""
    connection.begin()
    try:
        yield
        connection.commit()
    except BaseException:
        connection.rollback()
        raise


class Server(Protocol):
    """A place that has a database. At most *num_writers* transactions write at a time."""

    num_writers: int

    def open(self) -> Connection:
        """Open a connection. Raises DatabaseFailed."""
