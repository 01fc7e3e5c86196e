"""A file that is read again whenever it has changed, such as a mounted secret."""

from pathlib import Path

from saccade.errors import StartupError


class WatchedFile:
    """The file at *path*, of at most *max_bytes*. Its time, size and inode tell whether it has changed."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._state: tuple[int, ...] | None = None

    def read(self) -> bytes | None:
        """Return the content, None where it is what was read last.

        Raises StartupError, whose message is the cause alone, where it cannot be read or is too long.
        """
        try:
            with self.path.open("rb") as file:
                stat = self.path.stat()
                state = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
                if state == self._state:
                    return None
                content = file.read(self._max_bytes + 1)
        except OSError as error:
            raise StartupError(error.strerror or "it is not readable") from error
        if len(content) > self._max_bytes:
            raise StartupError(f"it has more than {self._max_bytes} bytes")
        self._state = state
        return content
