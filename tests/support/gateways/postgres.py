"""A PostgreSQL server for a test run, on a Unix socket, from the programs that the machine has."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from waiting import wait_until

DEBIAN = Path("/usr/lib/postgresql")
USER = "saccade"


def program(name: str) -> str | None:
    """The path of one of PostgreSQL's programs; Debian keeps them out of PATH."""
    folders = sorted(DEBIAN.glob("*/bin"), key=lambda folder: int(folder.parent.name), reverse=True)
    return shutil.which(name, path=os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")]))


IS_INSTALLED = program("initdb") is not None and program("postgres") is not None


@dataclass
class Postgres:
    """A server whose data and socket are in *folder*. It can be stopped, killed and started again."""

    folder: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        # Without fsync, only a crash of the machine could lose anything.
        options = ("-c", "listen_addresses=", "-c", "fsync=off", "-k", str(self.folder))
        command = [str(program("postgres")), "-D", str(self.folder / "data"), *options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, **_owner(), stdout=subprocess.DEVNULL, stderr=log)
        wait_until(lambda: (self.folder / ".s.PGSQL.5432").exists() and self._answers())

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop the server: its clients are cut off."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None

    @property
    def url(self) -> str:
        """The URL of the only database."""
        return f"postgresql://{USER}@/postgres?host={self.folder}"

    def new_schema(self) -> str:
        """A URL with tables of its own; to make a database would take seconds."""
        import psycopg

        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"create schema {name}".encode())
        return f"{self.url}&options=-csearch_path%3D{name}"

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.Error:
            return False
        return True


def _owner() -> dict[str, str]:
    """Whom PostgreSQL runs as: it refuses root."""
    return {"user": "nobody"} if os.geteuid() == 0 else {}


@contextlib.contextmanager
def running() -> Iterator[Postgres]:
    """A server, for the block."""
    with tempfile.TemporaryDirectory(prefix="saccade-pg-") as name:
        folder = Path(name)
        if os.geteuid() == 0:
            shutil.chown(folder, "nobody")
        subprocess.run(
            [str(program("initdb")), "-D", str(folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync"],
            **_owner(),
            check=True,
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        server = Postgres(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)
