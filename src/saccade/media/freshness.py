"""How long the answer of a web server may be used again, after RFC 9111 for a private cache."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

HEADERS = ("cache-control", "expires", "date", "age", "etag", "last-modified", "vary")
"""The headers of an answer that say so."""


@dataclass(frozen=True)
class Reuse:
    """What may be done with an answer later.

    *fresh_seconds* is how long from its arrival it may be used unasked; after that the server is asked whether it
    still holds. *url* is where it came from in the end, and the only one that its validators may be sent to: another
    server could use the same tag for another picture. *headers* are those of HEADERS, in lower case.
    """

    url: str
    headers: Mapping[str, str]
    fresh_seconds: float = 0.0
    is_forbidden: bool = False

    @property
    def is_storable(self) -> bool:
        """Whether it may be kept, and is of use later."""
        return not self.is_forbidden and (self.fresh_seconds > 0 or bool(self.conditions))

    def at_most(self, seconds: float) -> "Reuse":
        """Return the same for an answer that was found by a redirect, which holds for *seconds*."""
        return replace(self, fresh_seconds=min(self.fresh_seconds, seconds))

    @property
    def conditions(self) -> dict[str, str]:
        """The request headers that ask whether the answer still holds (RFC 9110 section 13)."""
        asked = {"If-None-Match": self.headers.get("etag"), "If-Modified-Since": self.headers.get("last-modified")}
        return {name: value for name, value in asked.items() if value}


def reuse_of(
    url: str, headers: Mapping[str, str], now: float, delay_seconds: float, known: Reuse | None = None
) -> Reuse:
    """Return what *headers* of an answer from *url* allow; a 304 renews *known* and says only what has changed.

    It came at *now*, in Unix seconds, *delay_seconds* after it was asked for. An answer without an explicit lifetime
    has none: a guess from its age could show a picture that is no longer there.
    """
    kept = {name: value for name, value in known.headers.items() if name != "age"} if known else {}
    merged = {**kept, **{name: headers[name] for name in HEADERS if name in headers}}
    directives = _directives(merged.get("cache-control", ""))
    fresh_seconds = _lifetime_seconds(merged, directives, now) - _age_seconds(merged, now, delay_seconds)
    if "no-cache" in directives:
        fresh_seconds = 0.0
    is_forbidden = "no-store" in directives or "*" in merged.get("vary", "")
    return Reuse(url, merged, max(0.0, fresh_seconds), is_forbidden)


def redirect_fresh_seconds(status: int, headers: Mapping[str, str], now: float) -> float:
    """Return how long a redirect that came at *now*, in Unix seconds, holds by itself.

    Unless it says so (RFC 9110 section 15.4), a permanent one holds as long as what it leads to and a temporary one
    not at all.
    """
    directives = _directives(headers.get("cache-control", ""))
    if "no-store" in directives or "no-cache" in directives:
        return 0.0
    if "max-age" in directives or "expires" in headers:
        return max(0.0, _lifetime_seconds(headers, directives, now) - _age_seconds(headers, now))
    return math.inf if status in (301, 308) else 0.0


def _directives(cache_control: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for directive in cache_control.split(","):
        name, _, value = directive.partition("=")
        found.setdefault(name.strip().lower(), []).append(value.strip().strip('"'))
    return found


def _lifetime_seconds(headers: Mapping[str, str], directives: Mapping[str, list[str]], now: float) -> float:
    """Section 4.2.1: max-age, else Expires; what cannot be read counts as over. s-maxage is for shared caches."""
    if "max-age" in directives:
        return min(_seconds(value) for value in directives["max-age"])
    if "expires" in headers:
        expires = _timestamp(headers["expires"])
        date = _timestamp(headers.get("date", ""))
        return (expires or 0.0) - (now if date is None else date)
    return 0.0


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
