"""Addresses of servers with data-parallel ranks: every rank is a worker of its own.

SCHEME://HOST:PORT            a server, or all its ranks together
SCHEME://HOST:PORT?ranks=N    N workers, one for each rank
SCHEME://HOST:PORT?rank=K     the worker of rank K
"""

import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from saccade.errors import StartupError

MAX_RANKS = 1024
NAMES = frozenset({"ranks", "rank"})


class RankUrl(NamedTuple):
    """An address: the server's, `SCHEME://HOST:PORT`, and the numbers that it gives as `ranks` and `rank`."""

    server: str
    ranks: int | None = None
    rank: int | None = None

    @classmethod
    def read(cls, url: str) -> "RankUrl":
        """Read *url*. Raises ValueError if it is malformed."""
        parts = urlsplit(url)
        is_server = bool(parts.hostname and parts.port) and parts.path in ("", "/") and not parts.fragment
        query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        numbers = {name: int(value) for name, value in query if name in NAMES and re.fullmatch(r"[0-9]{1,4}", value)}
        if not is_server or parts.username or not len(numbers) == len(query) <= 1:
            raise ValueError(url)
        if not 1 <= numbers.get("ranks", 1) <= MAX_RANKS:
            raise ValueError(url)
        return cls(f"{parts.scheme}://{parts.netloc}", **numbers)


@dataclass(frozen=True)
class RankedAddresses:
    """The addresses of *kind*'s servers. Each begins with *scheme*, or with *tls_scheme* if the kind has TLS."""

    kind: str
    scheme: str
    tls_scheme: str = ""

    @property
    def schemes(self) -> tuple[str, ...]:
        """Both schemes, or the only one."""
        return tuple(filter(None, (self.scheme, self.tls_scheme)))

    def worker_urls(self, url: str) -> tuple[str, ...]:
        """Return the address of every worker of *url*: itself, or with `?ranks=N` one for each data-parallel rank.

        Raises StartupError.
        """
        address = self._read(url)
        return tuple(f"{address.server}?rank={rank}" for rank in range(address.ranks or 0)) or (url,)

    def read_worker(self, url: str) -> RankUrl:
        """Read the address of one worker. Raises StartupError."""
        address = self._read(url)
        if address.ranks is not None:
            raise self._malformed(url)
        return address

    def _read(self, url: str) -> RankUrl:
        if not url.startswith(self.schemes):
            raise self._malformed(url)
        try:
            return RankUrl.read(url)
        except ValueError as error:
            raise self._malformed(url) from error

    def _malformed(self, url: str) -> StartupError:
        with_tls = f", or {self.tls_scheme}host:port with TLS" if self.tls_scheme else ""
        return StartupError(
            f"The address of a {self.kind} worker is {self.scheme}host:port{with_tls}; with ?ranks=N at its end if it "
            f"has N data-parallel ranks, at most {MAX_RANKS}. It is not {url!r}."
        )
