"""Vision embeddings by content, under a byte budget. Knows no torch: values are opaque, their size is told.

An entry is one picture's features, deepstack slices included, in storage of its own. Entries that an unfinished prefill
still needs are pinned; the others go, least recently used first, when room is needed. Pinned entries alone may pass the
budget: what one step encodes is bounded by the encode budget.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from math import prod
from typing import Generic, NamedTuple, TypeVar

from saccade.protocol.kv_events import KvEvent, PictureRemoved, PictureStored

V = TypeVar("V")


class EncoderKey(NamedTuple):
    """What makes two encodings the same: tenant, modality, picture with its processor's settings, and grid."""

    salt: bytes
    modality: str
    content_hash: bytes
    grid: tuple[int, int, int]

    @property
    def num_patches(self) -> int:
        """Patches that the vision encoder works on."""
        return prod(self.grid)


class EncoderCache(Generic[V]):
    """Least-recently-used cache with pins. A pin may be set before the entry exists.

    *on_event* hears of every picture that comes and goes.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.on_event: Callable[[KvEvent], None] | None = None
        self._entries: OrderedDict[EncoderKey, tuple[V, int]] = OrderedDict()
        self._pins: Counter[EncoderKey] = Counter()

    def __contains__(self, key: EncoderKey) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: EncoderKey) -> V:
        """Return an entry that is there, and mark it used. Raises KeyError."""
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: EncoderKey, value: V, num_bytes: int) -> None:
        """Add an entry, evicting others until it fits or only pinned ones are left."""
        self._drop(key)
        self._entries[key] = (value, num_bytes)
        self.used_bytes += num_bytes
        if self.on_event is not None:
            self.on_event(PictureStored(key.salt, key.content_hash))
        self._evict()

    def pin(self, key: EncoderKey) -> None:
        """Keep the entry, or the one that will be put, until as many `unpin` calls."""
        self._pins[key] += 1

    def unpin(self, key: EncoderKey) -> None:
        """Undo one `pin`."""
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]
            self._evict()

    def clear(self) -> None:
        """Drop every entry that is not pinned."""
        for key in [key for key in self._entries if key not in self._pins]:
            self._drop(key)

    def snapshot(self) -> Iterator[PictureStored]:
        """Return every picture that is held now; what changes later is not seen."""
        keys = list(self._entries)
        return (PictureStored(key.salt, key.content_hash) for key in keys)

    def _evict(self) -> None:
        if self.used_bytes <= self.budget_bytes:
            return
        for key in [key for key in self._entries if key not in self._pins]:
            self._drop(key)
            if self.used_bytes <= self.budget_bytes:
                return

    def _drop(self, key: EncoderKey) -> None:
        if key in self._entries:
            self.used_bytes -= self._entries.pop(key)[1]
            if self.on_event is not None:
                self.on_event(PictureRemoved(key.salt, key.content_hash))
