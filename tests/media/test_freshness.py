"""How long an answer may be used again, by the rules of RFC 9111 for a private cache."""

import math
from email.utils import formatdate

import pytest
from tables import table

from saccade.media.freshness import Reuse, redirect_fresh_seconds, reuse_of

URL = "http://pictures.test/a"
NOW = 1_800_000_000.0


def _date(seconds_from_now: float) -> str:
    return formatdate(NOW + seconds_from_now, usegmt=True)


@table(
    ("headers", "fresh_seconds"),
    [
        ({"cache-control": "max-age=600"}, 600),
        ({"cache-control": "public, Max-Age=600, immutable"}, 600),
        ({"cache-control": 'max-age="600"'}, 600),
        ({"cache-control": "max-age=600", "age": "100"}, 500),
        ({"cache-control": "max-age=600", "age": "700"}, 0),
        ({"cache-control": "max-age=600, max-age=60"}, 60),
        ({"cache-control": "max-age=600", "expires": _date(9000)}, 600),
        ({"cache-control": "max-age=600", "date": _date(-200)}, 400),
        ({"cache-control": "max-age=600", "date": _date(3600)}, 600),
        ({"cache-control": "max-age=600, no-cache"}, 0),
        ({"cache-control": 'max-age=600, no-cache="set-cookie, a"'}, 0),
        ({"cache-control": "s-maxage=600"}, 0),
        ({"cache-control": "max-age=soon"}, 0),
        ({"cache-control": "max-age=-5"}, 0),
        ({"cache-control": "max-age"}, 0),
        ({"expires": _date(600), "date": _date(0)}, 600),
        ({"expires": _date(600)}, 600),
        ({"expires": _date(7800), "date": _date(7200)}, 600),
        ({"expires": "0"}, 0),
        ({"expires": "soon", "date": _date(0)}, 0),
        ({"last-modified": _date(-1e7)}, 0),
        ({}, 0),
    ],
)
def test_lifetime_follows_the_headers(headers: dict[str, str], fresh_seconds: float) -> None:
    assert reuse_of(URL, headers, NOW, 0.0).fresh_seconds == fresh_seconds


@table(
    ("headers", "is_storable"),
    [
        ({"cache-control": "max-age=600"}, True),
        ({"cache-control": "private, max-age=600"}, True),
        ({"etag": '"a"'}, True),
        ({"last-modified": _date(-60)}, True),
        ({"cache-control": "no-cache", "etag": '"a"'}, True),
        ({"cache-control": "no-cache"}, False),
        ({"cache-control": "no-store", "etag": '"a"'}, False),
        ({"cache-control": "max-age=600, No-Store"}, False),
        ({"cache-control": "max-age=600", "vary": "*"}, False),
        ({"cache-control": "max-age=600", "vary": "Accept"}, True),
        ({"cache-control": "max-age=0"}, False),
        ({}, False),
    ],
)
def test_storable_responses(headers: dict[str, str], is_storable: bool) -> None:
    assert reuse_of(URL, headers, NOW, 0.0).is_storable == is_storable


def test_not_modified_renews_by_the_new_headers() -> None:
    old = {"cache-control": "max-age=60", "etag": '"a"', "age": "59", "last-modified": "then"}
    known = reuse_of(URL, old, NOW, 0.0)
    assert known.conditions == {"If-None-Match": '"a"'}
    same = reuse_of(URL, {}, NOW, 0.0, known)
    assert (same.fresh_seconds, same.conditions) == (60, known.conditions)
    other = reuse_of(URL, {"cache-control": "max-age=600", "etag": '"b"'}, NOW, 1.0, known)
    assert (other.fresh_seconds, other.conditions["If-None-Match"]) == (599, '"b"')
    assert not reuse_of(URL, {"cache-control": "no-store"}, NOW, 0.0, known).is_storable


@table(
    ("old", "new", "seconds_later", "fresh_seconds", "conditions"),
    [
        ({"etag": '"a"'}, {"last-modified": "then"}, 0, 0, {"If-None-Match": '"a"'}),
        ({"last-modified": "then"}, {"last-modified": "now"}, 0, 0, {"If-Modified-Since": "now"}),
        ({"last-modified": "then"}, {"etag": '"b"'}, 0, 0, {"If-None-Match": '"b"'}),
        ({"etag": '"a"'}, {"etag": "x" * 1025}, 0, 0, {}),
        ({"etag": '"a"', "expires": _date(600)}, {}, 100, 500, {"If-None-Match": '"a"'}),
        ({"etag": '"a"', "expires": _date(600)}, {"cache-control": "public"}, 100, 500, {"If-None-Match": '"a"'}),
        ({"etag": '"a"', "expires": _date(600)}, {"date": _date(50), "expires": _date(650)}, 50, 600, {"If-None-Match": '"a"'}),
        ({"etag": '"a"', "cache-control": "max-age=60"}, {"expires": _date(600)}, 0, 60, {"If-None-Match": '"a"'}),
        ({"etag": '"a"', "cache-control": "max-age=60"}, {"cache-control": "public"}, 0, 0, {"If-None-Match": '"a"'}),
        ({"etag": '"a"', "cache-control": "no-cache, max-age=60"}, {}, 0, 0, {"If-None-Match": '"a"'}),
        ({"etag": '"a"', "cache-control": "no-cache"}, {"cache-control": "max-age=60"}, 0, 60, {"If-None-Match": '"a"'}),
        ({"etag": '"a"', "cache-control": "max-age=60", "age": "50"}, {"age": "10"}, 60, 50, {"If-None-Match": '"a"'}),
    ],
)  # fmt: skip
def test_renewal_changes_only_the_headers_it_has(
    old: dict[str, str], new: dict[str, str], seconds_later: float, fresh_seconds: float, conditions: dict[str, str]
) -> None:
    renewed = reuse_of(URL, new, NOW + seconds_later, 0.0, reuse_of(URL, old, NOW, 0.0))
    assert (renewed.fresh_seconds, renewed.conditions) == (fresh_seconds, conditions)


@pytest.mark.parametrize("name", ["cache-control", "expires", "date", "age"])
def test_answer_with_an_endless_header_is_not_kept(name: str) -> None:
    headers = {"cache-control": "max-age=600", "etag": '"a"'}
    assert reuse_of(URL, headers, NOW, 0.0).is_storable
    assert not reuse_of(URL, {**headers, name: "max-age=600" + "," * 1024}, NOW, 0.0).is_storable


@table(
    ("status", "headers", "fresh_seconds"),
    [
        (301, {}, math.inf),
        (308, {}, math.inf),
        (302, {}, 0),
        (307, {}, 0),
        (302, {"cache-control": "max-age=60"}, 60),
        (301, {"cache-control": "max-age=60"}, 60),
        (301, {"cache-control": "no-store"}, 0),
        (301, {"cache-control": "max-age=60, no-cache"}, 0),
    ],
)
def test_redirect_bounds_what_it_leads_to(status: int, headers: dict[str, str], fresh_seconds: float) -> None:
    assert redirect_fresh_seconds(status, headers, NOW) == fresh_seconds
    assert Reuse(URL, 600.0).at_most(fresh_seconds).fresh_seconds == min(fresh_seconds, 600)
