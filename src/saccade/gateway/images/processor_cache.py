"""A cache of prepared pixels, for requests that repeat an image."""

from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

from saccade.byte_lru import ByteLru
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage
from saccade.gateway.single_flight import SingleFlight

Ts = TypeVarTuple("Ts")
Key = tuple[bytes, bytes, str]


class ProcessorCache:
    """An LRU cache of patches in slots of *pool*. It keeps at most *budget_bytes*; 0 keeps none.

    Every image that get() returns holds one reference to its slot, which pool.release() drops.
    """

    def __init__(self, pool: DecodePool, budget_bytes: int) -> None:
        self._pool = pool
        self._flights = SingleFlight[Key, PreparedImage]()
        self._entries = ByteLru[Key, PreparedImage](budget_bytes, self._flights.__contains__, self._let_go)
        self.num_hits = 0
        self.num_misses = 0
        pool.reclaim = self._reclaim

    async def get(self, key: Key, prepare: Callable[[*Ts], Awaitable[PreparedImage]], *args: *Ts) -> PreparedImage:
        """Return the image for *key*. If it is not cached, *prepare* makes it from *args*.

        Raises what *prepare* raises.
        """
        image = self._entries.get(key)
        if image is not None and self._pool.is_lost(image) and key not in self._flights:
            self._entries.drop(key)
            image = None
        if image is not None:
            self.num_hits += 1
            return self._lend(image)
        if key in self._flights:
            self.num_hits += 1
        else:
            self.num_misses += 1
        try:
            # Nothing else runs between the end of the flight and retain() that could release the slot.
            return self._lend(await self._flights.join(key, self._keep, key, prepare, *args))
        finally:
            self._entries.trim()

    @property
    def num_bytes(self) -> int:
        """Size of the cached images, in bytes."""
        return self._entries.num_bytes

    @property
    def num_idle(self) -> int:
        """How many cached slots no request holds."""
        images = (image for _, image in self._entries.items() if image.slot is not None)
        return sum(not self._pool.is_held_by_others(image) for image in images)

    def clear(self) -> None:
        """Drop everything except images that requests wait for."""
        self._entries.clear()

    def close(self) -> None:
        """Drop everything."""
        for key in list(self._entries):
            self._entries.drop(key)

    async def _keep(self, key: Key, prepare: Callable[[*Ts], Awaitable[PreparedImage]], *args: *Ts) -> PreparedImage:
        image = await prepare(*args)
        self._entries.put(key, image, image.num_bytes)
        return image

    def _lend(self, image: PreparedImage) -> PreparedImage:
        self._pool.retain(image)
        return image

    def _let_go(self, _: Key, image: PreparedImage) -> None:
        if image.slot is not None:
            self._pool.release([image.slot.name])

    def _reclaim(self, num_bytes: int) -> bool:
        """Free slots until they have *num_bytes* together, least recently used first; return whether any was freed.

        Slots that requests hold are skipped, since dropping them would free nothing.
        """
        missing_bytes = num_bytes
        for key, image in list(self._entries.items()):
            if missing_bytes <= 0:
                break
            if key not in self._flights and not self._pool.is_held_by_others(image):
                self._entries.drop(key)
                missing_bytes -= image.num_bytes
        return missing_bytes < num_bytes
