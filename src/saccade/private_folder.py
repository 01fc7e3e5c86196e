"""Makes a folder that no other user may enter, for one run's files and sockets."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from saccade.errors import StartupError


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder with mode 0700, and remove it after the block. Raises StartupError if none can be made."""
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix)
    except OSError as error:
        raise StartupError(
            f"A temporary folder cannot be made: {error.strerror}. Set TMPDIR to a folder that is not full, and to "
            "which this user may write."
        ) from error
    with folder as path:
        yield Path(path)
