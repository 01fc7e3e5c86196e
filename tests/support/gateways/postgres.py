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


@dataclass(frozen=True)
class Tls:
    """A port on which a server takes connections over TLS, and the files of its certificate."""

    port: int
    certificate: Path
    key: Path


@dataclass
class Postgres:
    """A server whose data and socket are in *folder*. It can be stopped, killed and started again."""

    folder: Path
    tls: Tls | None = None
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        # Without fsync, only a crash of the machine could lose anything.
        settings = {"listen_addresses": "", "fsync": "off", **self._settings_of_tls()}
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        command = [str(program("postgres")), "-D", str(self.folder / "data"), *options, "-k", str(self.folder)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, **_owner(), stdout=subprocess.DEVNULL, stderr=log)
        wait_until(lambda: (self.folder / f".s.PGSQL.{self._port}").exists() and self._answers())

    def stop(self, how: int = signal.SIGINT) -> None:
        """Stop the server: its clients are cut off."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait()
            self.process = None

    @property
    def url(self) -> str:
        """The URL of the only database."""
        return f"postgresql://{USER}@/postgres?host={self.folder}&port={self._port}"

    def new_schema(self) -> str:
        """A URL with tables of its own; to make a database would take seconds."""
        import psycopg

        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"create schema {name}".encode())
        return f"{self.url}&options=-csearch_path%3D{name}"

    @property
    def _port(self) -> int:
        return 5432 if self.tls is None else self.tls.port

    def _settings_of_tls(self) -> dict[str, str]:
        """The settings for connections over TLS, if there are any; the server has copies of the files."""
        if self.tls is None:
            return {}
        data = self.folder / "data"
        for name, file in (("server.crt", self.tls.certificate), ("server.key", self.tls.key)):
            shutil.copyfile(file, data / name)
            (data / name).chmod(0o600)
            if os.geteuid() == 0:
                shutil.chown(data / name, "nobody")
        (data / "pg_hba.conf").write_text("local all all trust\nhostssl all all 127.0.0.1/32 trust\n")
        return {"listen_addresses": "127.0.0.1", "port": str(self.tls.port), "ssl": "on"}

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
def running(tls: Tls | None = None) -> Iterator[Postgres]:
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
        server = Postgres(folder, tls)
        server.start()
        try:
            yield server
        finally:
            server.stop(signal.SIGQUIT)
