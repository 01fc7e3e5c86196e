"""Reads images from local files below a folder that the operator allows."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from yarl import URL

from saccade.errors import ImageTooLarge, InvalidImageUrl
from saccade.media.image_url import FILE_NOT_READ

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not block


def is_inside(url: URL, root: Path) -> bool:
    """Return whether the file: URL *url* names a path below *root* after links are resolved."""
    path = "" if "\0" in url.path else url.path
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def local_file_size(url: URL, root: Path, max_bytes: int) -> int:
    """Return the size in bytes of the file at *url*, a regular file below *root* after links are resolved.

    Raises InvalidImageUrl, with one message for missing and forbidden files, and ImageTooLarge over *max_bytes*.
    """
    with _open(url, root) as file:
        num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes > max_bytes:
        raise ImageTooLarge(f"The file has more than {max_bytes} bytes, which is the limit.")
    return num_bytes


def read_local_file(url: URL, root: Path, num_bytes: int) -> bytes:
    """Return the first *num_bytes* of the file at *url*. Raises InvalidImageUrl."""
    with _open(url, root) as file:
        return file.read(num_bytes)


@contextmanager
def _open(url: URL, root: Path) -> Iterator[BinaryIO]:
    """Open the file at *url* below *root*.

    Links are resolved first. Then every folder in the path is opened without following links, so that no folder can be
    replaced by a link in between. Raises InvalidImageUrl.
    """
    if url.raw_host not in (None, "", "localhost") or "\0" in url.path:
        raise InvalidImageUrl(FILE_NOT_READ)
    try:
        real_root = Path(os.path.realpath(root))
        inner = Path(os.path.realpath(url.path)).relative_to(real_root)
        with os.fdopen(_open_inside(real_root, inner.parts), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidImageUrl(FILE_NOT_READ)
            yield file
    except (OSError, ValueError):
        raise InvalidImageUrl(FILE_NOT_READ) from None


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
