"""Reads a file, such as a mounted secret, and reads it again only if it has changed."""

import os
import stat
from pathlib import Path

from saccade.errors import StartupError


class WatchedFile:
    """The file at *path*, of at most *max_bytes*. Its modification time, size and inode tell whether it has changed."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._state: tuple[int, ...] | None = None

    def read_content(self) -> bytes | None:
        """Return the content, or None if the file has not changed since it was last read.

        Raises StartupError if the file cannot be read, is not a regular file or is too long; the error's message
        gives only the cause.
        """
        try:
            # Opening a pipe or a device must not block the reader: it does not wait for the other end.
            with open(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise StartupError("it is not a regular file")
                state = (status.st_mtime_ns, status.st_size, status.st_ino)
                if state == self._state:
                    return None
                content = file.read(self._max_bytes + 1)
        except OSError as error:
            raise StartupError(error.strerror or "it is not readable") from error
        if len(content) > self._max_bytes:
            raise StartupError(f"it has more than {self._max_bytes} bytes")
        self._state = state
        return content
