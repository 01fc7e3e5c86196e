"""Fetches images by URL. This is the only module that connects to an address from a request.

A request must not reach internal hosts. A single parser reads the URL (image_url). The address of every connection is
checked at its socket (addresses), after redirects and DNS. This module follows redirects itself, and checks each one
like the first URL. It uses no proxy setting, cookie, password or referrer of this machine.
"""

import asyncio
import io
import math
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import aiohttp
from aiohttp.abc import AbstractResolver
from cyclopts import Parameter
from yarl import URL

from saccade.config import FLAT, NO_FLAG, Many
from saccade.errors import ImageTooLarge, InvalidImageUrl, QueueFull
from saccade.fair_queue import FairQueue
from saccade.media.addresses import SocketGuard
from saccade.media.freshness import HEADERS as REUSE_HEADERS
from saccade.media.freshness import Reuse, redirect_fresh_seconds, reuse_of
from saccade.media.image_url import FILE_NOT_READ, FILES_NOT_READ, NOT_FETCHED, UrlReader
from saccade.media.local_files import is_inside, local_file_size, read_local_file
from saccade.media.refusals import Refusals
from saccade.media.resolver import DnsResolver
from saccade.media.response_limits import limit_responses
from saccade.whole_numbers import read_whole_number

HEADERS = {
    "Accept": "image/jpeg, image/png, image/webp, image/gif, image/*;q=0.5, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "Saccade",
}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 1 << 16

BUFFER_BYTES = 1 << 19
"""The most that a connection receives of a body before it is read: two chunks, and one receipt of the event loop."""

HOLD_STEP_BYTES = 1 << 20
"""How many bytes to hold at a time for a body without Content-Length."""

_READ_HEADERS = (*REUSE_HEADERS, "location", "content-encoding")

# TLS errors come first: aiohttp derives them from connection errors.
_TROUBLES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    (
        (aiohttp.ClientSSLError, ssl.SSLError),
        "No secure connection to the URL's server could be made: its certificate does not verify.",
    ),
    ((aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, aiohttp.InvalidURL), NOT_FETCHED),
    ((aiohttp.ClientError, OSError, ValueError), "The URL's server closed the connection or did not answer in HTTP."),
)


@FLAT
@dataclass(frozen=True)
class FetchConfig:
    """The allowed hosts and files, and the limits of a fetch."""

    allowed_domains: Annotated[Many, Parameter(name="--allowed-media-domains")] = ()
    "A host that images may be fetched from, or *.suffix; may be given many times. Without any, every public host."
    allowed_networks: Annotated[Many, Parameter(name="--allowed-media-networks")] = ()
    "A network of private hosts that images may be fetched from, such as 10.1.0.0/16; may be given many times."
    local_root: Annotated[Path | None, Parameter(name="--allowed-local-media-path")] = None
    "A folder whose files clients may name in file: URLs."
    max_bytes: Annotated[int, NO_FLAG] = 32 << 20
    connect_timeout_seconds: Annotated[float, NO_FLAG] = 5.0
    timeout_seconds: Annotated[float, NO_FLAG] = 10.0
    "For a whole fetch with its redirects."
    turn_timeout_seconds: Annotated[float, NO_FLAG] = 10.0
    "For the wait before a fetch, until fewer than *max_concurrent* run."
    max_redirects: Annotated[int, NO_FLAG] = 3
    max_url_characters: Annotated[int, NO_FLAG] = 8192
    max_concurrent: Annotated[int, NO_FLAG] = 32
    max_concurrent_per_client: Annotated[int, NO_FLAG] = 24


@dataclass(frozen=True)
class Fetched:
    """An encoded image, and how it may be reused.

    If *not_modified*, the known image stays valid, and *encoded* is empty.
    """

    encoded: bytes
    reuse: Reuse
    not_modified: bool = False


async def _without_bound(nbytes: int) -> None:
    """Hold any number of bytes, without a limit."""


class _Holding:
    """The bytes that one fetch may keep. To get more, it awaits *hold*, and pauses *deadline* meanwhile."""

    def __init__(self, hold: Callable[[int], Awaitable[None]], deadline: asyncio.Timeout) -> None:
        self._hold = hold
        self._deadline = deadline
        self._num_bytes = 0

    async def reach(self, num_bytes: int) -> None:
        """Return once *num_bytes* in total are held."""
        missing = num_bytes - self._num_bytes
        if missing <= 0:
            return
        loop = asyncio.get_running_loop()
        ends_at = self._deadline.when()
        left_seconds = None if ends_at is None else ends_at - loop.time()
        self._deadline.reschedule(None)
        await self._hold(missing)
        self._num_bytes = num_bytes
        if left_seconds is not None:
            self._deadline.reschedule(loop.time() + left_seconds)


class Fetcher:
    """Fetches a gateway's images. *outcomes* counts fetches by outcome, and *num_bytes* counts the fetched bytes.

    close() also closes *resolver*, whose answers are checked like any address. Raises StartupError if a network or
    domain in *config* is malformed.
    """

    def __init__(self, config: FetchConfig, resolver: AbstractResolver | None = None) -> None:
        self._refusals = Refusals()
        self.guard = SocketGuard(config.allowed_networks, self._refusals)
        self.outcomes: Counter[str] = Counter()
        self.num_bytes = 0
        self._config = config
        self._urls = UrlReader(
            config.allowed_domains,
            config.max_url_characters,
            self._refusals,
            reads_files=config.local_root is not None,
        )
        self._resolver = resolver or DnsResolver()
        self._turns = FairQueue(
            config.max_concurrent,
            "image fetches",
            max_waiting=None,
            wait_seconds=config.turn_timeout_seconds,
            client_capacity=lambda _: config.max_concurrent_per_client,
        )
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the HTTP session in the running event loop."""
        connector = aiohttp.TCPConnector(
            socket_factory=self.guard.open_socket,
            resolver=self._resolver,
            ssl=ssl.create_default_context(),
            use_dns_cache=False,
            limit=0,
        )
        limit_responses(connector)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._config.connect_timeout_seconds),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=CHUNK_BYTES,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

    async def fetch(
        self,
        url: str,
        known: Reuse | None = None,
        *,
        client: Hashable = None,
        hold: Callable[[int], Awaitable[None]] = _without_bound,
    ) -> Fetched:
        """Return the image at *url*, or say that the *known* one is still valid.

        The fetch waits for *client*'s turn. Before it reads more bytes than it holds, it awaits *hold* with the
        difference. *hold* may wait, which does not count towards the time limit, and may raise. The caller releases
        the held bytes, even if the fetch fails.

        Raises InvalidImageUrl, with one message for all hosts that are forbidden or do not answer, and ImageTooLarge.
        Raises QueueFull if its turn does not come in time, or if no socket is left.
        """
        try:
            target = self._urls.read_url(url)
            root = self._config.local_root
            if target.scheme == "file" and root is None:
                self._refusals.note("files are not read", "--allowed-local-media-path")
                raise InvalidImageUrl(FILES_NOT_READ)
            with await self._turns.enter(client):
                if target.scheme == "file" and root is not None:
                    fetched = await self._read_file(target, root, hold)
                else:
                    fetched = await self._load(target, known, hold)
        except (InvalidImageUrl, ImageTooLarge, QueueFull) as error:
            self.outcomes[error.code] += 1
            raise
        self.outcomes["not_modified" if fetched.not_modified else "ok"] += 1
        self.num_bytes += len(fetched.encoded)
        return fetched

    async def _read_file(self, url: URL, root: Path, hold: Callable[[int], Awaitable[None]]) -> Fetched:
        if not await asyncio.to_thread(is_inside, url, root):
            self._refusals.note("the file is not in the allowed folder", "--allowed-local-media-path")
            raise InvalidImageUrl(FILE_NOT_READ)
        num_bytes = await asyncio.to_thread(local_file_size, url, root, self._config.max_bytes)
        await hold(num_bytes)
        encoded = await asyncio.to_thread(read_local_file, url, root, num_bytes)
        return Fetched(encoded, Reuse(str(url), is_forbidden=True))

    async def _load(self, url: URL, known: Reuse | None, hold: Callable[[int], Awaitable[None]]) -> Fetched:
        limit_seconds = self._config.timeout_seconds
        try:
            async with asyncio.timeout(limit_seconds) as deadline:
                holding = _Holding(hold, deadline)
                await holding.reach(BUFFER_BYTES)
                return await self._follow(url, known, holding)
        except TimeoutError:
            raise InvalidImageUrl(
                f"The URL's server is too slow: the whole file must arrive within {limit_seconds:g} seconds."
            ) from None

    async def _follow(self, url: URL, known: Reuse | None, holding: _Holding) -> Fetched:
        fresh_seconds = math.inf
        for _ in range(self._config.max_redirects + 1):
            is_known = known is not None and known.url == str(url)
            outcome = await self._ask(url, known if is_known else None, holding)
            if isinstance(outcome, Fetched):
                return replace(outcome, reuse=outcome.reuse.at_most(fresh_seconds))
            location, seconds = outcome
            fresh_seconds = min(fresh_seconds, seconds)
            url = self._urls.follow(url, location)
        raise InvalidImageUrl(f"The URL redirects more than {self._config.max_redirects} times.")

    async def _ask(self, url: URL, known: Reuse | None, holding: _Holding) -> Fetched | tuple[str, float]:
        """Return the image at *url*, or its redirect's target and for how many seconds the redirect is fresh."""
        if self._session is None:
            raise RuntimeError("start() comes before fetch().")
        started = time.monotonic()
        headers = known.conditions if known else {}
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                try:
                    return await self._read(response, url, known, started, holding)
                finally:
                    if not response.content.is_eof():
                        response.close()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidImageUrl(next(text for kinds, text in _TROUBLES if isinstance(error, kinds))) from None

    async def _read(
        self, response: aiohttp.ClientResponse, url: URL, known: Reuse | None, started: float, holding: _Holding
    ) -> Fetched | tuple[str, float]:
        lines = ((name, response.headers.getall(name, ())) for name in _READ_HEADERS)
        headers = {name: ", ".join(values) for name, values in lines if values}
        if response.status in REDIRECTS and "location" in headers:
            return headers["location"], redirect_fresh_seconds(response.status, headers, time.time())
        is_known = response.status == 304 and known is not None
        if response.status != 200 and not is_known:
            raise InvalidImageUrl(f"The URL's server answered with status {response.status}.")
        reuse = reuse_of(str(url), headers, time.time(), time.monotonic() - started, known if is_known else None)
        if is_known:
            return Fetched(b"", reuse, not_modified=True)
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise InvalidImageUrl("The URL's server sent a compressed body, which is not supported.")
        return Fetched(await self._body(response, holding), reuse)

    async def _body(self, response: aiohttp.ClientResponse, holding: _Holding) -> bytes:
        """Return the body. Read only as many bytes as are held, and no more than the limit."""
        limit_bytes = self._config.max_bytes
        length = read_whole_number(response.headers.get("content-length", ""), sys.maxsize)
        body = io.BytesIO()  # getvalue() does not copy
        num_bytes = 0
        if (length or 0) <= limit_bytes:
            await holding.reach(length or 0)
            while num_bytes <= limit_bytes:
                if length is None:
                    await holding.reach(_next_step(num_bytes + BUFFER_BYTES))
                chunk = await response.content.readany()
                if not chunk:
                    return body.getvalue()
                num_bytes += body.write(chunk)
                await asyncio.sleep(0)  # a fast server would otherwise block the event loop
        raise ImageTooLarge(f"The file at the URL has more than {limit_bytes} bytes, which is the limit.")


def _next_step(num_bytes: int) -> int:
    return -(-num_bytes // HOLD_STEP_BYTES) * HOLD_STEP_BYTES
