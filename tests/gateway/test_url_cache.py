"""Fetched pictures are kept as long as allowed, within a budget, each tenant's apart."""

import pytest

from saccade.gateway.url_cache import ENTRY_BYTES, UrlCache
from saccade.media.freshness import Reuse

ETAG = {"etag": '"a"'}


class Clock:
    """Seconds, as told."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_picture_is_fresh_for_its_time_and_then_to_be_asked_for() -> None:
    clock = Clock()
    cache = UrlCache(10_000, clock)
    assert cache.get(b"", "u") is None
    cache.put(b"", "u", b"picture", Reuse("u", ETAG, 60.0))
    freshness = []
    for clock.seconds in (0.0, 59.0, 60.0, 1e6):
        kept = cache.get(b"", "u")
        assert kept is not None
        assert (kept.encoded, kept.reuse.conditions) == (b"picture", {"If-None-Match": '"a"'})
        freshness.append(kept.is_fresh)
    assert freshness == [True, True, False, False]
    assert (cache.num_hits, cache.num_misses) == (2, 3)


def test_tenants_do_not_see_each_others_pictures() -> None:
    cache = UrlCache(10_000)
    cache.put(b"a", "u", b"picture", Reuse("u", ETAG, 60.0))
    assert cache.get(b"b", "u") is None
    assert cache.get(b"", "u") is None
    assert cache.get(b"a", "u") is not None


@pytest.mark.parametrize("reuse", [Reuse("u", ETAG, 60.0, is_forbidden=True), Reuse("u", {}, 0.0)])
def test_answer_that_may_not_be_kept_drives_out_the_one_before(reuse: Reuse) -> None:
    cache = UrlCache(10_000)
    cache.put(b"", "u", b"old", Reuse("u", ETAG, 60.0))
    cache.put(b"", "u", b"new", reuse)
    assert cache.get(b"", "u") is None
    assert cache.num_bytes == 0


def test_least_recently_used_leave_first_and_the_budget_holds() -> None:
    cache = UrlCache(3 * (ENTRY_BYTES + 101))
    for url in "abc":
        cache.put(b"", url, bytes(100), Reuse(url, ETAG, 60.0))
    cache.get(b"", "a")
    cache.put(b"", "d", bytes(100), Reuse("d", ETAG, 60.0))
    assert [url for url in "abcd" if cache.get(b"", url)] == ["a", "c", "d"]
    assert cache.num_bytes == 3 * (ENTRY_BYTES + 101)
    cache.put(b"", "e", bytes(10_000), Reuse("e", ETAG, 60.0))  # larger than all together: the others stay
    assert [url for url in "acde" if cache.get(b"", url)] == ["a", "c", "d"]


def test_no_capacity_keeps_nothing() -> None:
    cache = UrlCache(0)
    cache.put(b"", "u", b"", Reuse("u", ETAG, 60.0))
    assert cache.get(b"", "u") is None


def test_clearing_forgets_everything() -> None:
    cache = UrlCache(10_000)
    cache.put(b"", "u", b"picture", Reuse("u", ETAG, 60.0))
    cache.clear()
    assert cache.get(b"", "u") is None
    assert cache.num_bytes == 0
