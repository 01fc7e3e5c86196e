"""The encoder cache: budget, order of eviction, pins."""

from saccade.engine.encoder_cache import EncoderCache, EncoderKey


def key(name: str, salt: bytes = b"", grid: tuple[int, int, int] = (1, 2, 2)) -> EncoderKey:
    return EncoderKey(salt, "image", name.encode(), grid)


def filled(budget_bytes: int, *names: str) -> EncoderCache[str]:
    cache: EncoderCache[str] = EncoderCache(budget_bytes)
    for name in names:
        cache.put(key(name), name, 10)
    return cache


def test_least_recently_used_goes_first() -> None:  # [eng] 26
    cache = filled(30, "a", "b", "c")
    cache.get(key("a"))
    cache.put(key("d"), "d", 10)
    assert [name for name in "abcd" if key(name) in cache] == ["a", "c", "d"]
    assert cache.used_bytes == 30


def test_pinned_entries_stay_until_unpinned_as_often() -> None:  # [eng] 26
    cache = filled(20, "a")
    cache.pin(key("a"))
    cache.pin(key("a"))
    for name in "bcd":
        cache.put(key(name), name, 10)
    assert [name for name in "abcd" if key(name) in cache] == ["a", "d"]
    cache.unpin(key("a"))
    cache.pin(key("e"))
    cache.put(key("e"), "e", 20)
    assert [name for name in "ade" if key(name) in cache] == ["a", "e"]
    assert cache.used_bytes == 30  # pinned entries may stand over the budget
    cache.unpin(key("a"))
    assert [name for name in "ae" if key(name) in cache] == ["e"]


def test_an_entry_over_the_budget_lives_while_it_is_pinned() -> None:
    cache: EncoderCache[str] = EncoderCache(5)
    cache.pin(key("a"))
    cache.put(key("a"), "a", 10)
    assert cache.get(key("a")) == "a"
    cache.unpin(key("a"))
    assert len(cache) == cache.used_bytes == 0


def test_tenant_and_grid_are_part_of_the_key() -> None:  # [eng] 9, 39
    cache = filled(30, "a")
    assert key("a", salt=b"other") not in cache
    assert key("a", grid=(1, 4, 1)) not in cache


def test_putting_twice_counts_once() -> None:
    assert filled(30, "a", "a").used_bytes == 10
