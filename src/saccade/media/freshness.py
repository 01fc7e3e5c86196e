"""Decides how long a web server's answer may be reused, by the rules of RFC 9111 for a private cache."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

MAX_HEADER_CHARACTERS = 1024
"""A longer validator counts as absent; an answer with a longer header about its lifetime is not kept."""

_TIMES = ("cache-control", "expires", "date", "age")
_VALIDATORS = (("etag", "If-None-Match"), ("last-modified", "If-Modified-Since"))

HEADERS = (*_TIMES, "etag", "last-modified", "vary")
"""The headers that determine an answer's lifetime."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The lifetime that an answer's headers state."""

    max_age_seconds: float | None = None
    """Overrides *expires*."""
    expires: float | None = None
    """In seconds since 1970."""
    is_asked_for: bool = False
    """no-cache: the answer is revalidated before every use, whatever the other two say."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """How an answer may be reused."""

    url: str
    """The URL after redirects, and the only one to which *validator* may be sent: another server could use the same tag
    for another image."""
    fresh_seconds: float = 0.0
    """How long after its arrival it may be used without a request. Then it must be revalidated."""
    validator: tuple[str, str] | None = None
    """Name and value of the header of a conditional request."""
    is_forbidden: bool = False
    lifetime: Lifetime = Lifetime()
    """What a 304 answer inherits."""

    @property
    def is_storable(self) -> bool:
        """Whether the answer may be stored and can be of use later."""
        return not self.is_forbidden and (self.fresh_seconds > 0 or self.validator is not None)

    def at_most(self, seconds: float) -> "Reuse":
        """Return this reuse, limited to the *seconds* for which a redirect to it is fresh."""
        return replace(self, fresh_seconds=min(self.fresh_seconds, seconds))

    @property
    def conditions(self) -> dict[str, str]:
        """The conditional request headers for a revalidation (RFC 9110 section 13)."""
        return dict([self.validator]) if self.validator else {}


def reuse_of(
    url: str, headers: Mapping[str, str], now: float, delay_seconds: float, known: Reuse | None = None
) -> Reuse:
    """Return the reuse that the *headers* of an answer from *url* allow. Those of a 304 update the *known* reuse.

    The answer arrived at *now*, in Unix seconds, *delay_seconds* after the request. Without an explicit lifetime, the
    lifetime is 0: a guess could be too long, and the server may have replaced the image.
    """
    is_too_long = any(len(headers.get(name, "")) > MAX_HEADER_CHARACTERS for name in _TIMES)
    if is_too_long or "*" in headers.get("vary", ""):
        return Reuse(url, is_forbidden=True)
    directives = _directives(headers.get("cache-control", ""))
    lifetime = _lifetime(headers, directives, now, known.lifetime if known else Lifetime())
    return Reuse(
        url,
        max(0.0, _lifetime_seconds(lifetime, headers, now) - _age_seconds(headers, now, delay_seconds)),
        _validator(headers, known.validator if known else None),
        "no-store" in directives,
        lifetime,
    )


def redirect_fresh_seconds(status: int, headers: Mapping[str, str], now: float) -> float:
    """Return how long a redirect that arrived at *now*, in Unix seconds, is fresh.

    Without an explicit lifetime (RFC 9110 section 15.4), a permanent redirect is fresh as long as its target. A
    temporary one is then not fresh at all.
    """
    reuse = reuse_of("", headers, now, 0.0)
    if reuse.is_forbidden or reuse.lifetime.is_asked_for:
        return 0.0
    if reuse.lifetime != Lifetime():
        return reuse.fresh_seconds
    return math.inf if status in (301, 308) else 0.0


def _directives(cache_control: str) -> dict[str, list[str]]:
    directives: dict[str, list[str]] = {}
    for directive in cache_control.split(","):
        name, _, value = directive.partition("=")
        directives.setdefault(name.strip().lower(), []).append(value.strip().strip('"'))
    return directives


def _lifetime(headers: Mapping[str, str], directives: Mapping[str, list[str]], now: float, known: Lifetime) -> Lifetime:
    """Return the lifetime that *headers* state. What they leave out comes from *known*."""
    if "cache-control" in headers:
        ages = [_seconds(value) for value in directives.get("max-age", ())]
        known = replace(known, max_age_seconds=min(ages, default=None), is_asked_for="no-cache" in directives)
    if "expires" in headers:
        known = replace(known, expires=_timestamp(headers["expires"]) or 0.0)
    return known


def _lifetime_seconds(lifetime: Lifetime, headers: Mapping[str, str], now: float) -> float:
    """Return the lifetime in seconds: max-age, or else Expires minus Date (section 4.2.1); 0 for no-cache.

    A malformed value counts as expired. s-maxage is ignored, because it is for shared caches.
    """
    if lifetime.is_asked_for:
        return 0.0
    if lifetime.max_age_seconds is not None:
        return lifetime.max_age_seconds
    if lifetime.expires is not None:
        date = _timestamp(headers.get("date", ""))
        return lifetime.expires - (now if date is None else date)
    return 0.0


def _validator(headers: Mapping[str, str], known: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return the conditional request header for the ETag, or else for Last-Modified.

    *known* stays if the answer has neither, or if it is an ETag and the answer has none. Text that is not ASCII is
    ignored, since it has more bytes than characters.
    """
    if known is not None and known[0] == "If-None-Match" and "etag" not in headers:
        return known
    for name, condition in _VALIDATORS:
        value = headers.get(name, "")
        if value and value.isascii() and len(value) <= MAX_HEADER_CHARACTERS:
            return condition, value
    return known if "etag" not in headers and "last-modified" not in headers else None


def _age_seconds(headers: Mapping[str, str], now: float, delay_seconds: float = 0.0) -> float:
    """Return the seconds since the origin made the answer, by its clock or by the caches in between (section 4.2.3)."""
    date = _timestamp(headers.get("date", ""))
    apparent = max(0.0, now - date) if date is not None else 0.0
    return max(apparent, _seconds(headers.get("age", "0")) + delay_seconds)


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 12 else 0.0


def _timestamp(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
