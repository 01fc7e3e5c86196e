"""Addresses of servers with data-parallel ranks: every rank is a worker of its own.

SCHEME://HOST:PORT            a server, or all its ranks together
SCHEME://HOST:PORT?ranks=N    N workers, one for each rank
SCHEME://HOST:PORT?rank=K     the worker of rank K
"""

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

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

    @property
    def of_ranks(self) -> tuple[str, ...]:
        """The address of each rank; empty without `ranks`."""
        return tuple(f"{self.server}?rank={rank}" for rank in range(self.ranks or 0))
