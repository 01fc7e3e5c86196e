"""Uploaded files: each tenant's own, for their time, within the bound."""

import tracemalloc

import msgspec
import pytest
from tables import table

from saccade.errors import FileNotFound, ImageTooLarge, UnsupportedParameter
from saccade.gateway.image_source import is_file_id
from saccade.gateway.images.file_store import MAX_FILES, FileObject, StoredFile, file_id
from saccade.gateway.images.memory_files import ENTRY_BYTES, MemoryFileStore

ROOM = 4
"""Files of 1000 bytes for which there is room."""


class Clock:
    """Seconds, as told."""

    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> MemoryFileStore:
    return MemoryFileStore(ROOM * (1000 + ENTRY_BYTES), 100, clock)


async def put(store: MemoryFileStore, tenant: bytes, number: int, expires_at: int = 1100) -> str:
    content = bytes([number]) * 1000
    known_as = file_id(tenant, content)
    about = FileObject(id=known_as, bytes=1000, created_at=1000, expires_at=expires_at, filename="a", purpose="vision")
    await store.put(tenant, StoredFile(about, content))
    return known_as


async def is_there(store: MemoryFileStore, tenant: bytes, known_as: str) -> bool:
    try:
        return bool((await store.get(tenant, known_as, "f")).content)
    except FileNotFound:
        return False


def test_ids_are_those_of_content_and_tenant() -> None:
    ids = {file_id(tenant, content) for tenant in (b"", b"t", b"u") for content in (b"", b"t", b"a")}
    assert len(ids) == 9
    assert all(map(is_file_id, ids))
    assert file_id(b"t", b"a") == file_id(b"t", b"a")


async def test_tenants_do_not_find_each_others_files(store: MemoryFileStore) -> None:
    own = await put(store, b"t", 1)
    assert await is_there(store, b"t", own)
    assert await store.files_of(b"u") == []
    for method in (store.get, store.delete):
        with pytest.raises(FileNotFound) as refused:
            await method(b"u", own, "f")
        assert (refused.value.param, refused.value.status) == ("f", 404)
    assert [about.id for about in await store.files_of(b"t")] == [own]


async def test_the_same_content_is_one_file(store: MemoryFileStore) -> None:
    assert await put(store, b"t", 1) == await put(store, b"t", 1)
    assert len(await store.files_of(b"t")) == 1
    assert store.num_bytes == 1000 + ENTRY_BYTES


async def test_files_are_kept_for_their_time(store: MemoryFileStore, clock: Clock) -> None:
    short, long = await put(store, b"t", 1, expires_at=1010), await put(store, b"t", 2)
    again = await put(store, b"t", 3, expires_at=1010)
    await put(store, b"t", 3, expires_at=1050)
    clock.seconds = 1009.9
    assert await is_there(store, b"t", short)
    clock.seconds = 1010
    assert [await is_there(store, b"t", known_as) for known_as in (short, long, again)] == [False, True, True]
    clock.seconds = 1100
    assert await store.files_of(b"t") == []
    assert store.num_bytes == 0


@table("jump", [3600, -3600, 10**9, -(10**9)])
async def test_the_time_of_day_rules_no_file(jump: int, clock: Clock) -> None:
    store = MemoryFileStore(1 << 20, 100, clock)
    content = bytes(10)
    times = {"created_at": 10**9 + jump, "expires_at": 10**9 + jump + 100}
    about = FileObject(id=file_id(b"t", content), bytes=10, filename="a", purpose="vision", **times)
    await store.put(b"t", StoredFile(about, content))
    clock.seconds += 99
    assert await is_there(store, b"t", about.id)
    clock.seconds += 1
    assert not await is_there(store, b"t", about.id)


async def test_deleted_files_are_gone(store: MemoryFileStore) -> None:
    own = await put(store, b"t", 1)
    await store.delete(b"t", own, "f")
    assert not await is_there(store, b"t", own)
    assert store.num_bytes == 0
    assert await is_there(store, b"t", await put(store, b"t", 1))


async def test_the_tenant_that_holds_most_loses_its_oldest_file(store: MemoryFileStore) -> None:
    other = await put(store, b"u", 9)
    first, second, third = [await put(store, b"t", number) for number in range(3)]
    assert await is_there(store, b"t", first)
    await put(store, b"u", 8)
    assert [await is_there(store, b"t", known_as) for known_as in (first, second, third)] == [False, True, True]
    assert await is_there(store, b"u", other)
    assert store.num_bytes <= ROOM * (1000 + ENTRY_BYTES)


async def test_files_are_listed_in_the_order_of_their_uploads(store: MemoryFileStore) -> None:
    ids = [await put(store, b"t", number) for number in (2, 0, 1)]
    await store.get(b"t", ids[0], "f")
    assert [about.id for about in await store.files_of(b"t")] == ids
    assert await put(store, b"t", 2) == ids[0]
    assert [about.id for about in await store.files_of(b"t")] == [*ids[1:], ids[0]]


async def test_a_tenant_has_a_bounded_number_of_files(clock: Clock) -> None:
    store = MemoryFileStore(1 << 30, 100, clock)
    about = FileObject(id="", bytes=0, created_at=0, expires_at=2000, filename="a", purpose="vision")
    for number in range(MAX_FILES + 1):
        await store.put(b"t", StoredFile(msgspec.structs.replace(about, id=str(number)), b""))
    ids = [about.id for about in await store.files_of(b"t")]
    assert (ids[0], ids[-1], len(ids)) == ("1", str(MAX_FILES), MAX_FILES)


async def test_a_file_over_the_bound(store: MemoryFileStore) -> None:
    content = bytes(ROOM * (1000 + ENTRY_BYTES))
    about = FileObject(id="file-", bytes=len(content), created_at=0, expires_at=2000, filename="a", purpose="vision")
    with pytest.raises(ImageTooLarge):
        await store.put(b"t", StoredFile(about, content))
    assert store.num_bytes == 0


async def test_a_store_of_nothing_names_the_field() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        await MemoryFileStore(0, 100).get(b"t", "file-", "messages[0]")
    assert refused.value.param == "messages[0]"
    assert "--file-store-bytes" in refused.value.message


async def test_uploads_of_one_file_take_no_memory_for_each(store: MemoryFileStore) -> None:
    kept = await put(store, b"t", 0)
    tracemalloc.start()
    for _ in range(10_000):
        await put(store, b"t", 0)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 100_000
    assert await is_there(store, b"t", kept)
