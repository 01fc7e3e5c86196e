"""Fetched images are kept as long as allowed, within a budget, each tenant's apart."""

import gc
import sys

import pytest
from tables import table

from saccade.gateway.images.url_cache import ENTRY_BYTES, UrlCache
from saccade.media.freshness import HEADERS, MAX_HEADER_CHARACTERS, Reuse, reuse_of

ETAG = ("If-None-Match", '"a"')


class Clock:
    """Seconds, as told."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_image_is_fresh_for_its_lifetime_then_stale() -> None:
    clock = Clock()
    cache = UrlCache(10_000, clock)
    assert cache.get(b"", "u") is None
    cache.put(b"", "u", b"image", Reuse("u", 60.0, ETAG))
    freshness = []
    for clock.seconds in (0.0, 59.0, 60.0, 1e6):
        kept = cache.get(b"", "u")
        assert kept is not None
        assert (kept.encoded, kept.reuse.conditions) == (b"image", {"If-None-Match": '"a"'})
        freshness.append(kept.is_fresh)
    assert freshness == [True, True, False, False]
    assert (cache.num_hits, cache.num_misses) == (2, 3)


def test_tenants_do_not_see_each_others_images() -> None:
    cache = UrlCache(10_000)
    cache.put(b"a", "u", b"image", Reuse("u", 60.0, ETAG))
    assert cache.get(b"b", "u") is None
    assert cache.get(b"", "u") is None
    assert cache.get(b"a", "u") is not None


@pytest.mark.parametrize("reuse", [Reuse("u", 60.0, ETAG, is_forbidden=True), Reuse("u", 0.0)])
def test_answer_that_may_not_be_kept_drives_out_the_one_before(reuse: Reuse) -> None:
    cache = UrlCache(10_000)
    cache.put(b"", "u", b"old", Reuse("u", 60.0, ETAG))
    cache.put(b"", "u", b"new", reuse)
    assert cache.get(b"", "u") is None
    assert cache.num_bytes == 0


def test_least_recently_used_leave_first_and_the_budget_holds() -> None:
    cache = UrlCache(3 * (ENTRY_BYTES + 101))
    for url in "abc":
        cache.put(b"", url, bytes(100), Reuse(url, 60.0, ETAG))
    cache.get(b"", "a")
    cache.put(b"", "d", bytes(100), Reuse("d", 60.0, ETAG))
    assert [url for url in "abcd" if cache.get(b"", url)] == ["a", "c", "d"]
    assert cache.num_bytes == 3 * (ENTRY_BYTES + 101)
    cache.put(b"", "e", bytes(10_000), Reuse("e", 60.0, ETAG))  # larger than all together: the others stay
    assert [url for url in "acde" if cache.get(b"", url)] == ["a", "c", "d"]


def test_no_capacity_keeps_nothing() -> None:
    cache = UrlCache(0)
    cache.put(b"", "u", b"", Reuse("u", 60.0, ETAG))
    assert cache.get(b"", "u") is None


def num_bytes_held(root: object) -> int:
    """Return the bytes of everything that *root* leads to, types and other things that all share aside."""
    seen: dict[int, object] = {}
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) not in seen and not isinstance(thing, type | type(sys) | type(num_bytes_held)):
            seen[id(thing)] = thing
            waiting += gc.get_referents(thing)
    return sum(sys.getsizeof(thing) for thing in seen.values())


@table(
    "headers",
    [
        {"cache-control": "max-age=600"},
        {"cache-control": "max-age=600", "etag": "x" * MAX_HEADER_CHARACTERS},
        {"cache-control": "max-age=600", "etag": "x" * 800_000, "last-modified": "y" * MAX_HEADER_CHARACTERS},
        {"cache-control": "max-age=600", "etag": "\U0001f600" + "x" * 1000},
        {"cache-control": "max-age=600", **dict.fromkeys(("etag", "last-modified", "vary"), "x" * 800_000)},
        {"etag": '"a"', "vary": "x" * 800_000},
        {"cache-control": "max-age=600, " + "x" * 800_000, "etag": '"a"'},
        dict.fromkeys(HEADERS, "x" * 800_000),
    ],
)
@table("path", ["a", "a" * 8000, "\U0001f600" * 1000])
def test_memory_is_no_more_than_the_counted_bytes(headers: dict[str, str], path: str) -> None:
    cache = UrlCache(1 << 30)
    empty = num_bytes_held(cache)
    for index in range(100):
        url = f"http://pictures.test/{index}/{path}"
        fresh = {name: value[:1] + value[1:] for name, value in headers.items()}  # texts of its own, as from a socket
        cache.put(f"salt {index}".encode(), url, bytes(100), reuse_of(f"{url}/elsewhere", fresh, 0.0, 0.0))
    assert num_bytes_held(cache) - empty <= cache.num_bytes


def test_entry_of_long_headers_is_kept_without_them() -> None:
    cache = UrlCache(1 << 20)
    headers = {"cache-control": "max-age=600", "etag": "x" * 800_000, "last-modified": "then"}
    cache.put(b"", "u", b"image", reuse_of("u", headers, 0.0, 0.0))
    kept = cache.get(b"", "u")
    assert kept is not None
    assert (kept.is_fresh, kept.reuse.conditions) == (True, {"If-Modified-Since": "then"})


def test_clearing_forgets_everything() -> None:
    cache = UrlCache(10_000)
    cache.put(b"", "u", b"image", Reuse("u", 60.0, ETAG))
    cache.clear()
    assert cache.get(b"", "u") is None
    assert cache.num_bytes == 0
