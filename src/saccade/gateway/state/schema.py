"""The database's tables, and the migrations that make them."""

from typing import Final

from saccade.errors import StartupError
from saccade.gateway.state.connection import Connection, transaction

SCHEMA_LOCK: Final = 0x5ACCADE1
"""Held by a gateway that migrates the database."""

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """create table item (
            tenant bytea not null,
            kind integer not null,
            id bytea not null,
            previous bytea,
            used bigint not null,
            expires bigint not null,
            bytes bigint not null,
            head bytea not null,
            body bytea not null,
            primary key (tenant, kind, id)
        )""",
        "create index item_used on item (tenant, used)",
        "create index item_expires on item (expires)",
        """create table holding (
            tenant bytea not null,
            kind integer not null,
            items bigint not null,
            bytes bigint not null,
            primary key (tenant, kind)
        )""",
    ),
    (
        "create table gateway (id bytea primary key, seen bigint not null, batch bigint not null)",
        """create table usage (
            tenant bytea not null,
            model text not null,
            day integer not null,
            requests bigint not null,
            refused bigint not null,
            prompt_tokens bigint not null,
            cached_tokens bigint not null,
            completion_tokens bigint not null,
            image_bytes bigint not null,
            primary key (day, tenant, model)
        )""",
    ),
    (
        """create table bucket (
            tenant bytea not null,
            kind integer not null,
            per_minute double precision not null,
            asked double precision not null,
            owed double precision not null,
            level double precision not null,
            at bigint not null,
            granted double precision not null,
            primary key (tenant, kind)
        )""",
    ),
    (
        """create table batch (
            tenant bytea not null,
            id bytea not null,
            created bigint not null,
            state integer not null,
            owner bytea not null,
            lease bigint not null,
            bytes bigint not null,
            head bytea not null,
            source bytea not null,
            primary key (tenant, id)
        )""",
        "create index batch_state on batch (state, lease)",
        """create table answer (
            tenant bytea not null,
            batch bytea not null,
            line integer not null,
            is_error integer not null,
            body bytea not null,
            primary key (tenant, batch, line)
        )""",
    ),
)
"""The statements of each version. A version only adds to the one before, so that gateways of the last release still
run.

- item: what clients have stored. Its `head` can be shown without the body. `previous` is the response that this
  one continues. `used`, in microseconds, is when it was stored or continued; `expires` is in seconds. `bytes` counts
  against the tenant's quota.
- holding: how many items of each kind a tenant has, and how many bytes. It changes in the same transaction as they do.
- gateway: the gateway processes. `seen`, in seconds, is when one last wrote; `batch` is the number of its last usage.
- usage: what a tenant has used of a model on a day, which is in days since 1970.
- bucket: what is left of a tenant's limit per minute: `level` units at the microsecond `at`. `granted` is what the last
  draw got.
- batch: a batch of requests, whose file is `source`. The gateway `owner` works on it until `lease`, in seconds.
- answer: the answers to its lines until it ends.
"""


def migrate(connection: Connection, check: bytes, is_encrypted: bool) -> None:
    """Bring the tables to the newest version, which other gateways wait for.

    *check* is that of the key. Raises a StartupError if the database belongs to another key or to a newer release, or
    if it has encrypted contents and *is_encrypted* is false, or the reverse. Raises DatabaseFailed.
    """
    with transaction(connection):
        connection.lock(SCHEMA_LOCK)
        connection.execute("create table if not exists meta (name varchar(20) primary key, value bytea not null)")
        meta = dict(connection.rows(tuple[str, bytes], "select name, value from meta"))
        version = int(meta.get("version", b"0"))
        if version > len(MIGRATIONS):
            raise StartupError(
                f"The database of --state has version {version}, and this release knows versions up to "
                f"{len(MIGRATIONS)}: a newer release has used it. Install that release."
            )
        if meta.setdefault("check", check) != check:
            raise StartupError(
                "The database of --state belongs to another key: pass the --state-key-file of its other gateways."
            )
        contents = b"encrypted" if is_encrypted else b"plain"
        if meta.setdefault("contents", contents) != contents:
            raise StartupError(
                "The database of --state has encrypted contents: pass --state-encrypt."
                if not is_encrypted
                else "The database of --state has contents that are not encrypted: leave out --state-encrypt, or begin "
                "a new database."
            )
        for statement in (one for statements in MIGRATIONS[version:] for one in statements):
            connection.execute(statement)
        meta["version"] = b"%d" % len(MIGRATIONS)
        for name, value in meta.items():
            connection.execute(
                "insert into meta (name, value) values (?, ?) on conflict (name) do update set value = excluded.value",
                name,
                value,
            )
