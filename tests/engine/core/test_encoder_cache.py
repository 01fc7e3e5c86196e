"""The encoder cache: budget, order of eviction, pins."""

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.images import EncoderKey, RequestImage, Until
from saccade.protocol.media import MediaItem, Span


def key(name: str, salt: bytes = b"", grid: tuple[int, int, int] = (1, 2, 2)) -> EncoderKey:
    return EncoderKey(salt, "image", name.encode(), grid)


def image(name: str) -> RequestImage:
    item = MediaItem(
        modality="image", content_hash=name.encode(), grid=(1, 2, 2), spans=(Span(0, 1),), pixel_shape=(4, 1)
    )
    return RequestImage(item, b"", "media[0]")


def put(cache: EncoderCache, name: str, num_bytes: int = 10) -> None:
    cache.begin_image(key(name), num_bytes)
    cache.complete(key(name))


def filled(budget_bytes: int, *names: str) -> EncoderCache:
    cache = EncoderCache(budget_bytes)
    for name in names:
        put(cache, name)
    return cache


def test_least_recently_used_goes_first() -> None:  # [eng] 26
    cache = filled(30, "a", "b", "c")
    cache.output_id(key("a"))
    put(cache, "d")
    assert [name for name in "abcd" if key(name) in cache] == ["a", "c", "d"]
    assert cache.used_bytes == 30


def test_pinned_entries_stay_until_the_last_pin_is_gone() -> None:  # [eng] 26
    cache = filled(20, "a")
    one, other = image("a"), image("a")
    cache.pin(one, 0, Until.COMPUTED)
    cache.pin(one, 1, Until.COMPUTED)
    cache.pin(other, 0, Until.ENDED)
    for name in "bcd":
        put(cache, name)
    assert [name for name in "abcd" if key(name) in cache] == ["a", "d"]
    cache.unpin(one, 0)
    cache.unpin(other, 0)
    cache.begin_image(key("e"), 20)
    cache.pin(large := image("e"), 0, Until.COMPUTED)
    cache.complete(key("e"))
    assert [name for name in "ade" if key(name) in cache] == ["a", "e"]
    assert cache.used_bytes == 30  # pinned entries may stand over the budget
    assert cache.pins == {key("a"): {one}, key("e"): {large}}
    cache.unpin(one, 0)
    assert key("a") in cache
    cache.unpin(one, 1)
    assert [name for name in "ae" if key(name) in cache] == ["e"]


def test_entry_over_the_budget_stays_while_pinned() -> None:
    cache = EncoderCache(5)
    cache.begin_image(key("a"), 10)
    cache.pin(pinned := image("a"), 0, Until.COMPUTED)
    cache.complete(key("a"))
    assert key("a") in cache
    cache.unpin(pinned, 0)
    assert len(cache) == cache.used_bytes == 0


def test_lookup_does_not_count_as_use() -> None:
    cache = filled(20, "a", "b")
    assert key("a") in cache
    assert cache.has_begun(key("a"))
    cache.pin(pinned := image("a"), 0, Until.COMPUTED)
    cache.unpin(pinned, 0)
    put(cache, "c")
    assert [name for name in "abc" if key(name) in cache] == ["b", "c"]


def test_tenant_and_grid_are_part_of_the_key() -> None:  # [eng] 9, 39
    cache = filled(30, "a")
    assert key("a", salt=b"other") not in cache
    assert key("a", grid=(1, 4, 1)) not in cache


def test_dropped_ids_are_reported_once_and_never_reused() -> None:
    cache = filled(20, "a", "b")
    ids = [cache.output_id(key(name)) for name in "ab"]
    put(cache, "c")
    assert cache.take_dropped() == (ids[0],)
    assert cache.take_dropped() == ()
    put(cache, "a")
    assert cache.output_id(key("a")) not in ids


def test_outputs_being_encoded_are_neither_cached_nor_dropped() -> None:
    cache = EncoderCache(15)
    cache.begin_image(key("a"), 10)
    put(cache, "b")
    assert key("a") not in cache
    assert cache.has_begun(key("a"))
    assert key("b") not in cache  # an image under way keeps its room
    failed = cache.output_id(key("a"))
    cache.take_dropped()
    cache.abandon(key("a"))
    assert cache.used_bytes == 0
    assert cache.take_dropped() == (failed,)
