"""A cache under a budget of bytes."""

from saccade.byte_lru import ByteLru, TenantLru


def test_least_recently_used_leaves_first() -> None:
    dropped: list[tuple[str, int]] = []
    cache = ByteLru[str, int](30, on_drop=lambda key, value: dropped.append((key, value)))
    for number, name in enumerate("abc"):
        cache.put(name, number, 10)
    assert cache.get("a") == 0
    assert cache.get("unknown") is None
    assert (cache.peek("b"), cache.peek("unknown")) == (1, None)
    cache.put("d", 3, 15)
    assert dropped == [("b", 1), ("c", 2)]
    assert list(cache.items()) == [("a", 0), ("d", 3)]
    assert (cache.num_bytes, len(cache)) == (25, 2)


def test_replaced_and_popped_values_are_not_dropped() -> None:
    dropped: list[str] = []
    cache = ByteLru[str, int](30, on_drop=lambda key, _: dropped.append(key))
    cache.put("a", 1, 10)
    cache.put("a", 2, 20)
    assert (cache.get("a"), cache.num_bytes) == (2, 20)
    assert cache.pop("a") == 2
    assert cache.pop("a") is None
    assert ("a" in cache, cache.num_bytes, dropped) == (False, 0, [])


def test_pinned_stay_even_over_the_budget() -> None:
    pinned = {"a", "b"}
    cache = ByteLru[str, int](10, is_pinned=pinned.__contains__)
    for name in "abc":
        cache.put(name, 0, 10)
    assert list(cache) == ["a", "b"]
    pinned.clear()
    cache.trim()
    assert list(cache) == ["b"]
    pinned.add("b")
    cache.put("c", 0, 0)
    cache.clear()
    assert list(cache) == ["b"]
    cache.drop("b")
    cache.drop("b")
    assert cache.num_bytes == 0


def test_value_over_the_budget_leaves_no_tenant() -> None:
    cache: TenantLru[str, None] = TenantLru(10)
    cache.put(b"one", "a", None, 4)
    cache.put(b"two", "b", None, 11)
    assert list(cache.items()) == [(b"one", "a", None)]
    cache.put(b"two", "c", None, 6)
    assert cache.num_bytes == 10
    cache.put(b"one", "d", None, 1)
    assert [key for _, key, _ in cache.items()] == ["a", "d"]
