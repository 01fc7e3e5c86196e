"""Tracks which images' features the executors hold, keyed by content and limited to a byte budget.

The executors hold the tensors themselves, by id.

The cache makes room before an image is encoded, since the size of its features is known in advance. An unfinished
prefill pins the entries that it still needs; other entries are evicted, least recently used first. Pinned entries and
entries that are being encoded may exceed the budget, but the encode budget limits how much each step adds.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from saccade.byte_lru import ByteLru
from saccade.engine.core.images import EncoderKey, RequestImage, Until
from saccade.protocol.kv_events import ImageRemoved, ImageStored, KvEvent


@dataclass(slots=True)
class _CachedImage:
    """An image that is encoded, or whose encoding is planned. *images* are the requests' images that pin it."""

    output_id: int
    is_encoded: bool = False
    images: set[RequestImage] = field(default_factory=set)


class EncoderCache:
    """An LRU cache of encoder outputs, with pins.

    *on_event* is called for every image that becomes usable or is removed.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.on_event: Callable[[KvEvent], None] | None = None
        self._entries: ByteLru[EncoderKey, _CachedImage] = ByteLru(budget_bytes, self._is_kept, self._drop)
        self._dropped: list[int] = []
        self._num_begun = 0

    def __contains__(self, key: EncoderKey) -> bool:
        entry = self._entries.peek(key)
        return entry is not None and entry.is_encoded

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        return self._entries.num_bytes

    @property
    def pins(self) -> dict[EncoderKey, frozenset[RequestImage]]:
        """The requests' images that pin entries, by key."""
        return {key: frozenset(entry.images) for key, entry in self._entries.items() if entry.images}

    @property
    def has_dropped(self) -> bool:
        """Whether executors still hold encoder outputs that were dropped here."""
        return bool(self._dropped)

    def has_begun(self, key: EncoderKey) -> bool:
        """Whether the image is encoded, or is about to be."""
        return key in self._entries

    def output_id(self, key: EncoderKey) -> int:
        """Return the id of an entry, and mark the entry as used. Raises KeyError."""
        entry = self._entries.get(key)
        if entry is None:
            raise KeyError(key)
        return entry.output_id

    def is_pinned(self, key: EncoderKey) -> bool:
        """Whether a request needs the entry of *key*. Raises KeyError."""
        return bool(self._entry(key).images)

    def begin_image(self, key: EncoderKey, num_bytes: int) -> None:
        """Add an entry for an image that will be encoded, and evict others if needed."""
        self._num_begun += 1
        self._entries.put(key, _CachedImage(self._num_begun), num_bytes)

    def complete(self, key: EncoderKey) -> None:
        entry = self._entry(key)
        entry.is_encoded = True
        if self.on_event is not None:
            self.on_event(ImageStored(key.salt, key.content_hash))
        self._evict(key)

    def abandon(self, key: EncoderKey) -> None:
        """Remove the entry and pins of an image that was not encoded, or whose step failed."""
        entry = self._entry(key)
        self._entries.pop(key)
        for image in entry.images:
            image.pins.clear()
        self._dropped.append(entry.output_id)

    def pin(self, image: RequestImage, sample: int, until: Until) -> None:
        """Keep the entry of *image*, which is encoded or will be, until `unpin`. Raises KeyError."""
        self._entry(image.key).images.add(image)
        image.pins.add((sample, until))

    def unpin(self, image: RequestImage, sample: int, untils: Collection[Until] = tuple(Until)) -> None:
        """Remove *sample*'s pins, if it has any."""
        had_pins = bool(image.pins)
        image.pins.difference_update((sample, until) for until in untils)
        if had_pins and not image.pins:
            self._entry(image.key).images.remove(image)
            self._evict(image.key)

    def forget_image(self, key: EncoderKey) -> None:
        """Drop an entry unless it is pinned. An unknown key is ignored."""
        if key in self._entries and not self._is_kept(key):
            self._entries.drop(key)

    def clear(self) -> None:
        """Drop every entry that is encoded and not pinned."""
        self._entries.clear()

    def snapshot(self) -> Iterator[ImageStored]:
        """Return every image that is encoded now; later changes are not included."""
        keys = [key for key, entry in self._entries.items() if entry.is_encoded]
        return (ImageStored(key.salt, key.content_hash) for key in keys)

    def take_dropped(self) -> tuple[int, ...]:
        """Return the ids that executors must drop, each once."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _entry(self, key: EncoderKey) -> _CachedImage:
        """Return an entry without marking it as used. Raises KeyError."""
        entry = self._entries.peek(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def _evict(self, key: EncoderKey) -> None:
        """Drop an entry that is encoded and not pinned, if the budget is exceeded."""
        if self.used_bytes > self.budget_bytes and not self._is_kept(key):
            self._entries.drop(key)

    def _is_kept(self, key: EncoderKey) -> bool:
        entry = self._entry(key)
        return bool(entry.images) or not entry.is_encoded

    def _drop(self, key: EncoderKey, entry: _CachedImage) -> None:
        self._dropped.append(entry.output_id)
        if self.on_event is not None:
            self.on_event(ImageRemoved(key.salt, key.content_hash))
