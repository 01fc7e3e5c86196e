"""Prepared images are kept, shared while they are made, and given up for others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from saccade.errors import InvalidImage
from saccade.gateway.config import MediaSettings
from saccade.gateway.images.decode_pool.job import StageSeconds
from saccade.gateway.images.decode_pool.pool import DecodePool, PreparedImage
from saccade.gateway.images.processor_cache import Key, ProcessorCache

NUM_BYTES = 65_536
Prepare = Callable[[], Awaitable[PreparedImage]]


class Slots(DecodePool):
    """A pool whose images are slots that nobody fills: decoding has tests of its own."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(MediaSettings(shared_memory_bytes=num_slots * NUM_BYTES))
        self.num_prepared = 0
        self.go = asyncio.Event()
        self.go.set()

    async def prepare(self) -> PreparedImage:
        self.num_prepared += 1
        await self.go.wait()
        slot = self._acquire(NUM_BYTES)
        return PreparedImage(slot.ref if slot else None, None if slot else b"", NUM_BYTES, StageSeconds(), 0.0)


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[Slots]:
    slots = Slots(4)
    yield slots
    await slots.close()


def key(name: str, salt: bytes = b"") -> Key:
    return (salt, name.encode(), "uint8")


def release(pool: DecodePool, *images: PreparedImage) -> None:
    pool.release(image.slot.name for image in images if image.slot is not None)


async def test_an_image_seen_again_is_not_prepared_again(pool: Slots) -> None:
    cache = ProcessorCache(pool, 4 * NUM_BYTES)
    first = await cache.get(key("a"), pool.prepare)
    again = await cache.get(key("a"), pool.prepare)
    assert first.slot == again.slot
    assert (pool.num_prepared, cache.num_hits, cache.num_misses, cache.num_bytes) == (1, 1, 1, NUM_BYTES)
    release(pool, first, again)
    assert pool.num_slots == 1  # kept
    cache.close()
    assert pool.num_slots == 0


async def test_clearing_spares_entries_in_progress(pool: Slots) -> None:
    cache = ProcessorCache(pool, 4 * NUM_BYTES)
    release(pool, await cache.get(key("a"), pool.prepare))
    pool.go.clear()
    waiting = [asyncio.create_task(cache.get(key("b"), pool.prepare)) for _ in range(2)]
    while pool.num_prepared < 2:  # noqa: ASYNC110  every round of the loop counts
        await asyncio.sleep(0)
    pool.go.set()
    while cache.num_bytes < 2 * NUM_BYTES:  # noqa: ASYNC110
        await asyncio.sleep(0)
    cache.clear()  # b is made, and neither of the two has it yet
    release(pool, *await asyncio.gather(*waiting))
    assert cache.num_bytes == NUM_BYTES
    cache.clear()
    assert (cache.num_bytes, pool.num_slots) == (0, 0)


async def test_tenants_and_wires_share_nothing(pool: Slots) -> None:
    cache = ProcessorCache(pool, 4 * NUM_BYTES)
    for other in (key("a"), key("a", b"tenant"), (b"", b"a", "bfloat16")):
        release(pool, await cache.get(other, pool.prepare))
    assert (pool.num_prepared, cache.num_hits) == (3, 0)


@pytest.mark.parametrize("budget", [0, 4])
async def test_requests_at_the_same_time_share_one_decode(pool: Slots, budget: int) -> None:
    cache = ProcessorCache(pool, budget * NUM_BYTES)
    pool.go.clear()
    tasks = [asyncio.create_task(cache.get(key("a"), pool.prepare)) for _ in range(5)]
    await asyncio.sleep(0)
    pool.go.set()
    images = await asyncio.gather(*tasks)
    assert pool.num_prepared == 1
    assert len({image.slot.name for image in images if image.slot}) == 1
    release(pool, *images[:4])
    assert pool.num_slots == 1
    release(pool, images[4])
    assert pool.num_slots == bool(budget)


async def test_cancelled_request_does_not_end_a_shared_decode(pool: Slots) -> None:
    cache = ProcessorCache(pool, 0)
    pool.go.clear()
    stays, leaves = (asyncio.create_task(cache.get(key("a"), pool.prepare)) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    pool.go.set()
    release(pool, await stays)
    assert (pool.num_prepared, pool.num_slots) == (1, 0)


async def test_decode_without_requests_ends_and_the_next_begins_anew(pool: Slots) -> None:
    cache = ProcessorCache(pool, 4 * NUM_BYTES)
    pool.go.clear()
    tasks = [asyncio.create_task(cache.get(key("a"), pool.prepare)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pool.go.set()
    release(pool, await cache.get(key("a"), pool.prepare))
    assert pool.num_prepared == 2


async def test_a_bad_image_is_not_kept(pool: Slots) -> None:
    async def fail() -> PreparedImage:
        raise InvalidImage("damaged")

    cache = ProcessorCache(pool, 4 * NUM_BYTES)
    for _ in range(2):
        with pytest.raises(InvalidImage):
            await cache.get(key("a"), fail)
    assert (cache.num_misses, cache.num_bytes) == (2, 0)


async def test_the_longest_unused_goes_first(pool: Slots) -> None:
    cache = ProcessorCache(pool, 2 * NUM_BYTES)
    for name in ("a", "b", "a", "c"):
        release(pool, await cache.get(key(name), pool.prepare))
    assert cache.num_bytes == 2 * NUM_BYTES == pool.num_slots * NUM_BYTES
    before = pool.num_prepared
    release(pool, await cache.get(key("a"), pool.prepare))
    assert pool.num_prepared == before
    release(pool, await cache.get(key("b"), pool.prepare))
    assert pool.num_prepared == before + 1


async def test_cached_entries_make_room_for_entries_in_use(pool: Slots) -> None:
    cache = ProcessorCache(pool, 100 * NUM_BYTES)
    held = [await cache.get(key(f"held {number}"), pool.prepare) for number in range(2)]
    for number in range(6):
        image = await cache.get(key(str(number)), pool.prepare)
        assert image.slot is not None
        release(pool, image)
    assert len({image.slot.name for image in held if image.slot}) == 2
    release(pool, *held)
