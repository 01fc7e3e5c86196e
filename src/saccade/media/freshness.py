"""How long the answer of a web server may be used again, after RFC 9111 for a private cache."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

MAX_HEADER_CHARACTERS = 1024
"""A longer validator counts as absent; an answer with a longer header that says how long it holds is not kept."""

_TIMES = ("cache-control", "expires", "date", "age")
_VALIDATORS = (("etag", "If-None-Match"), ("last-modified", "If-Modified-Since"))

HEADERS = (*_TIMES, "etag", "last-modified", "vary")
"""The headers of an answer that say how long it may be used."""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What the server said of the lifetime: *max_age_seconds* wins over *expires*, in Unix seconds.

    With *is_asked_for* (no-cache) neither counts: the server is asked before every use.
    """

    max_age_seconds: float | None = None
    expires: float | None = None
    is_asked_for: bool = False


@dataclass(frozen=True, slots=True)
class Reuse:
    """What may be done with an answer later.

    *fresh_seconds* is how long from its arrival it may be used unasked; after that the server is asked whether it
    still holds. *url* is where it came from in the end, and the only one that its validator may be sent to: another
    server could use the same tag for another picture. *validator* is a request header that asks, by name and value;
    *lifetime* is what an answer inherits that renews this one.
    """

    url: str
    fresh_seconds: float = 0.0
    validator: tuple[str, str] | None = None
    is_forbidden: bool = False
    lifetime: Lifetime = Lifetime()

    @property
    def is_storable(self) -> bool:
        """Whether it may be kept, and is of use later."""
        return not self.is_forbidden and (self.fresh_seconds > 0 or self.validator is not None)

    def at_most(self, seconds: float) -> "Reuse":
        """Return the same for an answer that was found by a redirect, which holds for *seconds*."""
        return replace(self, fresh_seconds=min(self.fresh_seconds, seconds))

    @property
    def conditions(self) -> dict[str, str]:
        """The request headers that ask whether the answer still holds (RFC 9110 section 13)."""
        return dict([self.validator]) if self.validator else {}


def reuse_of(
    url: str, headers: Mapping[str, str], now: float, delay_seconds: float, known: Reuse | None = None
) -> Reuse:
    """Return what *headers* of an answer from *url* allow; a 304 renews *known* and says only what has changed.

    It came at *now*, in Unix seconds, *delay_seconds* after it was asked for. An answer without an explicit lifetime
    has none: a guess from its age could show a picture that is no longer there.
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
    """Return how long a redirect that came at *now*, in Unix seconds, holds by itself.

    Unless it says so (RFC 9110 section 15.4), a permanent one holds as long as what it leads to and a temporary one
    not at all.
    """
    reuse = reuse_of("", headers, now, 0.0)
    if reuse.is_forbidden or reuse.lifetime.is_asked_for:
        return 0.0
    if reuse.lifetime != Lifetime():
        return reuse.fresh_seconds
    return math.inf if status in (301, 308) else 0.0


def _directives(cache_control: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for directive in cache_control.split(","):
        name, _, value = directive.partition("=")
        found.setdefault(name.strip().lower(), []).append(value.strip().strip('"'))
    return found


def _lifetime(headers: Mapping[str, str], directives: Mapping[str, list[str]], now: float, known: Lifetime) -> Lifetime:
    """Return what *headers* say; a header that is absent says what it said when *known* came."""
    if "cache-control" in headers:
        ages = [_seconds(value) for value in directives.get("max-age", ())]
        known = replace(known, max_age_seconds=min(ages, default=None), is_asked_for="no-cache" in directives)
    if "expires" in headers:
        known = replace(known, expires=_timestamp(headers["expires"]) or 0.0)
    return known


def _lifetime_seconds(lifetime: Lifetime, headers: Mapping[str, str], now: float) -> float:
    """Section 4.2.1: max-age, else Expires; what cannot be read counts as over. s-maxage is for shared caches."""
    if lifetime.is_asked_for:
        return 0.0
    if lifetime.max_age_seconds is not None:
        return lifetime.max_age_seconds
    if lifetime.expires is not None:
        date = _timestamp(headers.get("date", ""))
        return lifetime.expires - (now if date is None else date)
    return 0.0


def _validator(headers: Mapping[str, str], known: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return one validator, the more exact one first. What is not ASCII takes more bytes than it has characters."""
    if known is not None and known[0] == "If-None-Match" and "etag" not in headers:
        return known
    for name, condition in _VALIDATORS:
        value = headers.get(name, "")
        if value and value.isascii() and len(value) <= MAX_HEADER_CHARACTERS:
            return condition, value
    return known if "etag" not in headers and "last-modified" not in headers else None


def _age_seconds(headers: Mapping[str, str], now: float, delay_seconds: float = 0.0) -> float:
    """Section 4.2.3: what passed since the origin said so, by its clock or by the caches' on the way."""
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
