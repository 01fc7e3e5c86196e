"""Images that workers are believed to keep because they were sent there. Such workers report none."""

from collections.abc import Iterable
from functools import partial

from saccade.byte_lru import ByteLru

MAX_MISSES = 3
"""A worker that lacks this many images in a row keeps none."""


class KeptImages:
    """The images that were sent to each worker last, up to a number of bytes, by image_key().

    A worker is a row, and the bit 1 << row in rows_of().
    """

    def __init__(self) -> None:
        self._images_at: dict[int, ByteLru[bytes, None]] = {}
        self._num_misses: dict[int, int] = {}
        self._rows: dict[bytes, int] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def rows_of(self, key: bytes) -> int:
        """Return the workers that are believed to keep the image *key*, as bits."""
        return self._rows.get(key, 0)

    def note_sent(self, row: int, images: Iterable[tuple[bytes, int]], max_bytes: int) -> None:
        """Note that the worker at *row*, which keeps *max_bytes*, has begun to answer a request with *images*.

        Each is a key, and the number of bytes that were sent, or 0 for an image that went by its name.
        """
        if self._num_misses.get(row, 0) >= MAX_MISSES:
            return
        images_at = self._images_at.setdefault(row, ByteLru(max_bytes, on_drop=partial(self._drop, row)))
        for key, num_bytes in images:
            if num_bytes:
                self._rows[key] = self._rows.get(key, 0) | 1 << row
                images_at.put(key, None, num_bytes)
            elif key in images_at:
                images_at.get(key)
                self._num_misses[row] = 0

    def note_missed(self, row: int) -> None:
        """Note that the worker at *row* lacked an image that it was believed to keep: it may lack others."""
        if row in self._images_at:
            num_misses = self._num_misses.get(row, 0) + 1
            self.forget(row)
            self._num_misses[row] = num_misses

    def forget(self, row: int) -> None:
        """Believe nothing of the worker at *row*: its caches are gone."""
        for key in self._images_at.pop(row, ()):
            self._drop(row, key)
        self._num_misses.pop(row, None)

    def _drop(self, row: int, key: bytes, _: None = None) -> None:
        rows = self._rows[key] & ~(1 << row)
        if rows:
            self._rows[key] = rows
        else:
            del self._rows[key]
