"""Writes files so that each appears only when it is complete."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file next to *path*. It becomes *path* after the block, or is removed if the block fails.

    Raises OSError.
    """
    part = path.with_name(f"{path.name}.new")
    try:
        yield part
        part.replace(path)
    finally:
        # After the renaming, there is nothing to remove.
        part.unlink(missing_ok=True)
