"""A JSON file of what the admin port has changed of the workers' traffic, so that it outlives the gateway."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from saccade.errors import StartupError
from saccade.fleet.traffic import NO_CHANGE, TrafficChange
from saccade.transport.framing import UNREADABLE
from saccade.watched_file import WatchedFile

MAX_FILE_BYTES = 1 << 20

Changes = Mapping[str, TrafficChange]
"""By the worker's url."""


class TrafficFile:
    """The file at *path*; several processes may read and change it.

    It is replaced whole, so nobody reads half of it. Its folder is locked meanwhile, so no change is lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watched = WatchedFile(path, MAX_FILE_BYTES)

    def create(self) -> Changes:
        """Return the content; write it back, or a new file. Raises StartupError if one of these is not possible."""
        with self._locked():
            changes = self._read() if self.path.exists() else {}
            self._write(changes)
            return changes

    def read_new(self) -> Changes | None:
        """Return the content if it is another than last time, else None. Raises StartupError."""
        with self._readable():
            content = self._watched.read_content()
            return None if content is None else _decoded(content)

    def change(self, worker: str, fields: Mapping[str, object]) -> Changes:
        """Replace *fields* in the change of *worker*, and return all changes. Raises StartupError."""
        with self._locked():
            changes = with_change(self._read(), worker, fields)
            self._write(changes)
            return changes

    def _read(self) -> Changes:
        with self._readable():
            return _decoded(WatchedFile(self.path, MAX_FILE_BYTES).read_content() or b"")

    def _write(self, changes: Changes) -> None:
        content = msgspec.json.format(msgspec.json.encode(changes)) + b"\n"
        if len(content) > MAX_FILE_BYTES:
            raise StartupError(
                f"--traffic-file {self.path} would have over {MAX_FILE_BYTES} bytes: clear workers that are gone."
            )
        part = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with self._writable():
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._writable():
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except StartupError as error:
            raise StartupError(f"--traffic-file {self.path} cannot be used: {error.message}.") from error

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StartupError(f"--traffic-file {self.path} cannot be written: {error.strerror}.") from error


def with_change(changes: Changes, worker: str, fields: Mapping[str, object]) -> Changes:
    """Return *changes* with other *fields* in that of *worker*, which is left out if nothing of it remains."""
    changed = msgspec.structs.replace(changes.get(worker, NO_CHANGE), **fields)
    others = {url: one for url, one in changes.items() if url != worker}
    return others if changed == NO_CHANGE else {**others, worker: changed}


def _decoded(content: bytes) -> Changes:
    try:
        return msgspec.json.decode(content, type=dict[str, TrafficChange])
    except UNREADABLE as error:
        raise StartupError(
            'it must be a JSON object of workers, such as {"grpc://HOST:PORT": {"cordoned": true, "weight": 0.5}}'
        ) from error
