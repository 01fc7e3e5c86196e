"""Pictures from files of this machine, for operators who name a folder that clients may read."""

import os
import stat
from pathlib import Path

from yarl import URL

from saccade.errors import ImageTooLarge, InvalidImageUrl
from saccade.media.image_url import NOT_FETCHED

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not be waited for


def read_local_file(url: URL, root: Path, max_bytes: int) -> bytes:
    """Return the content of file: *url*, a regular file that really lies under *root*.

    Links are resolved first; then every folder on the way is opened without following any, so that none can be
    swapped in between. Raises InvalidImageUrl, which does not tell missing from forbidden, and ImageTooLarge.
    """
    if url.raw_host not in (None, "", "localhost") or "\0" in url.path:
        raise InvalidImageUrl(NOT_FETCHED)
    try:
        real_root = Path(os.path.realpath(root))
        inner = Path(os.path.realpath(url.path)).relative_to(real_root)
        with os.fdopen(_open_inside(real_root, inner.parts), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidImageUrl(NOT_FETCHED)
            encoded = file.read(max_bytes + 1)
    except (OSError, ValueError):
        raise InvalidImageUrl(NOT_FETCHED) from None
    if len(encoded) > max_bytes:
        raise ImageTooLarge(f"The image's file has more than {max_bytes} bytes, which is the limit.")
    return encoded


def _open_inside(root: Path, parts: tuple[str, ...]) -> int:
    """Return a descriptor of the file at *parts* under *root*. Raises OSError."""
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1] if parts else ".", _FILE, dir_fd=folder)
    finally:
        os.close(folder)
