"""Batches in the database: who works on one, and the answers to its lines so far."""

from typing import Final, NamedTuple

from saccade.gateway.state.connection import Connection
from saccade.gateway.state.rows import Place, count_items

BATCH: Final = 3
"""The kind of a batch's place; its input and its answers count against the tenant's quota."""

OPEN, CANCELLED, ENDED = 0, 1, 2
"""States. A cancelled batch is open until its gateway has ended it."""

MAX_ENDED: Final = 1000
"""A tenant's batches that have ended; their heads do not count against its quota."""


class BatchRow(NamedTuple):
    """A batch: its state, who works on it until *lease* (in seconds since 1970), and its head, which is sealed."""

    state: int
    owner: bytes
    lease: int
    head: bytes


def insert_batch(connection: Connection, place: Place, created: int, head: bytes, source: bytes) -> None:
    """Insert an open batch. *created* is in microseconds, *source* is the sealed file of its requests."""
    connection.execute(
        "insert into batch (tenant, id, created, state, owner, lease, head, source, bytes) "
        "values (?, ?, ?, ?, ?, 0, ?, ?, ?)",
        *(place.tenant, place.name, created, OPEN, b"", head, source, len(source)),
    )
    count_items(connection, place, 1, len(source))


def batch_bytes(connection: Connection, tenant: bytes) -> int:
    """Return how many bytes the requests and answers of all batches of *tenant* take."""
    rows = connection.rows(tuple[int], "select bytes from holding where tenant = ? and kind = ?", tenant, BATCH)
    return rows[0][0] if rows else 0


def find_batch(connection: Connection, place: Place) -> BatchRow | None:
    """Return the batch at *place*, or None."""
    rows = connection.rows(
        BatchRow,
        "select state, owner, lease, head from batch where tenant = ? and id = ?",
        *(place.tenant, place.name),
    )
    return rows[0] if rows else None


def count_open(connection: Connection, tenant: bytes) -> int:
    """Return how many batches of *tenant* have not ended."""
    [(number,)] = connection.rows(
        tuple[int], "select count(*) from batch where tenant = ? and state < ?", tenant, ENDED
    )
    return number


def list_batches(connection: Connection, tenant: bytes) -> list[tuple[bytes, bytes]]:
    """Return name and head of all batches of *tenant*, the newest first."""
    return connection.rows(
        tuple[bytes, bytes], "select id, head from batch where tenant = ? order by created desc, id", tenant
    )


def free_batches(connection: Connection, now: int) -> list[tuple[bytes, bytes]]:
    """Return the tenant and the name of the batches that nobody works on, the oldest first."""
    return connection.rows(
        tuple[bytes, bytes],
        "select tenant, id from batch where state < ? and lease < ? order by created, id",
        *(ENDED, now),
    )


def take_lease(connection: Connection, place: Place, owner: bytes, now: int, until: int) -> BatchRow | None:
    """Take or renew the lease of a batch until *until*. Return None if another gateway has it, or it has ended."""
    rows = connection.rows(
        BatchRow,
        "update batch set owner = ?, lease = ? where tenant = ? and id = ? and state < ? and (owner = ? or lease < ?) "
        "returning state, owner, lease, head",
        *(owner, until, place.tenant, place.name, ENDED, owner, now),
    )
    return rows[0] if rows else None


def batch_source(connection: Connection, place: Place) -> bytes:
    """Return the sealed file of a batch's requests."""
    rows = connection.rows(
        tuple[bytes], "select source from batch where tenant = ? and id = ?", place.tenant, place.name
    )
    return rows[0][0] if rows else b""


def set_head(connection: Connection, place: Place, owner: bytes, state: int, head: bytes) -> None:
    """Change the head of a batch, if *owner* works on it, and it is in *state*."""
    connection.execute(
        "update batch set head = ? where tenant = ? and id = ? and owner = ? and state = ?",
        *(head, place.tenant, place.name, owner, state),
    )


def cancel_batch(connection: Connection, place: Place, head: bytes) -> None:
    """Mark a batch as cancelled, if it has not ended. *head* is its new head."""
    connection.execute(
        "update batch set state = ?, head = ? where tenant = ? and id = ? and state = ?",
        *(CANCELLED, head, place.tenant, place.name, OPEN),
    )


def end_batch(connection: Connection, place: Place, owner: bytes, head: bytes) -> None:
    """Set the last head of a batch, if *owner* works on it, and delete its requests and answers.

    Of the tenant's batches that have ended, the newest MAX_ENDED stay.
    """
    rows = connection.rows(
        tuple[int],
        "update batch set head = ?, state = ? where tenant = ? and id = ? and owner = ? and state < ? returning bytes",
        *(head, ENDED, place.tenant, place.name, owner, ENDED),
    )
    if not rows:
        return
    connection.execute("delete from answer where tenant = ? and batch = ?", place.tenant, place.name)
    connection.execute(
        "update batch set source = ?, bytes = 0 where tenant = ? and id = ?", b"", place.tenant, place.name
    )
    count_items(connection, place, -1, -rows[0][0])
    connection.execute(
        "delete from batch where tenant = ? and state = ? and created < ("
        "select created from batch where tenant = ? and state = ? order by created desc limit 1 offset ?)",
        *(place.tenant, ENDED, place.tenant, ENDED, MAX_ENDED - 1),
    )


def put_answer(connection: Connection, place: Place, line: int, is_error: bool, body: bytes) -> None:
    """Store the sealed answer to a line, unless there is one."""
    rows = connection.rows(
        tuple[int],
        "insert into answer (tenant, batch, line, is_error, body) values (?, ?, ?, ?, ?) "
        "on conflict (tenant, batch, line) do nothing returning line",
        *(place.tenant, place.name, line, int(is_error), body),
    )
    if rows:
        connection.execute(
            "update batch set bytes = bytes + ? where tenant = ? and id = ?", len(body), place.tenant, place.name
        )
        count_items(connection, place, 0, len(body))


def lines_with_answers(connection: Connection, place: Place) -> dict[int, bool]:
    """Return whether the answer is an error, by the number of each line that has one."""
    rows = connection.rows(
        tuple[int, int], "select line, is_error from answer where tenant = ? and batch = ?", place.tenant, place.name
    )
    return {line: bool(is_error) for line, is_error in rows}


def answer_bytes(connection: Connection, place: Place, is_error: bool) -> int:
    """Return how many bytes the answers of a batch take that are errors or not."""
    [(number,)] = connection.rows(
        tuple[int],
        "select cast(coalesce(sum(length(body)), 0) as bigint) from answer "
        "where tenant = ? and batch = ? and is_error = ?",
        *(place.tenant, place.name, int(is_error)),
    )
    return number


def answers_of(connection: Connection, place: Place, is_error: bool) -> list[tuple[int, bytes]]:
    """Return the answers of a batch that are errors or not, in the order of its lines."""
    return connection.rows(
        tuple[int, bytes],
        "select line, body from answer where tenant = ? and batch = ? and is_error = ? order by line",
        *(place.tenant, place.name, int(is_error)),
    )


def delete_old_batches(connection: Connection, before: int) -> None:
    """Delete batches that were created before *before*, in microseconds.

    One that has not ended belongs to a tenant whose key no gateway has any longer.
    """
    for tenant, name, state, num_bytes in connection.rows(
        tuple[bytes, bytes, int, int],
        "delete from batch where created < ? returning tenant, id, state, bytes",
        before,
    ):
        if state != ENDED:
            connection.execute("delete from answer where tenant = ? and batch = ?", tenant, name)
            count_items(connection, Place(tenant, BATCH, name), -1, -num_bytes)
