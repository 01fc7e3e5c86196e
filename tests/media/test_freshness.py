"""How long an answer may be used again, by the rules of RFC 9111 for a private cache."""

import math
from email.utils import formatdate

import pytest

from saccade.media.freshness import Reuse, redirect_fresh_seconds, reuse_of

URL = "http://images.test/a"
NOW = 1_800_000_000.0


def _date(seconds_from_now: float) -> str:
    return formatdate(NOW + seconds_from_now, usegmt=True)


@pytest.mark.parametrize(
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
def test_lifetime(headers: dict[str, str], fresh_seconds: float) -> None:
    assert reuse_of(URL, headers, NOW, 0.0).fresh_seconds == fresh_seconds


@pytest.mark.parametrize(
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
def test_what_is_kept(headers: dict[str, str], is_storable: bool) -> None:
    assert reuse_of(URL, headers, NOW, 0.0).is_storable == is_storable


def test_what_is_not_modified_is_renewed_by_what_the_answer_says() -> None:
    old = {"cache-control": "max-age=60", "etag": '"a"', "age": "59", "last-modified": "then"}
    known = reuse_of(URL, old, NOW, 0.0)
    assert known.conditions == {"If-None-Match": '"a"'}
    same = reuse_of(URL, {}, NOW, 0.0, known)
    assert (same.fresh_seconds, same.conditions) == (60, known.conditions)
    other = reuse_of(URL, {"cache-control": "max-age=600", "etag": '"b"'}, NOW, 1.0, known)
    assert (other.fresh_seconds, other.conditions["If-None-Match"]) == (599, '"b"')
    assert not reuse_of(URL, {"cache-control": "no-store"}, NOW, 0.0, known).is_storable


@pytest.mark.parametrize(
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
