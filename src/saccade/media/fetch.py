"""Fetches pictures by URL: the only module that connects to an address taken from a request.

A request must not turn the server inward. One parser reads the URL (image_url); the address of every connection is
judged at its socket (addresses), after redirects and name servers have had their say; redirects are followed here, each
judged as the first URL was; nothing of this machine goes along: no proxy, cookie, password or referrer.
"""

import asyncio
import math
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from saccade.errors import ImageTooLarge, InvalidImageUrl, QueueFull
from saccade.media.addresses import SocketGuard
from saccade.media.freshness import Reuse, redirect_fresh_seconds, reuse_of
from saccade.media.image_url import NOT_FETCHED, UrlReader
from saccade.media.local_files import read_local_file
from saccade.media.resolver import ThreadedResolver

HEADERS = {
    "Accept": "image/jpeg, image/png, image/webp, image/gif, image/*;q=0.5, */*;q=0.1",
    "Accept-Encoding": "identity",
    "User-Agent": "Saccade",
}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CHUNK_BYTES = 1 << 16

# TLS comes before the connection's other troubles: aiohttp derives the one from the other.
_TROUBLES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    (
        (aiohttp.ClientSSLError, ssl.SSLError),
        "No secure connection to the image's server could be made: its certificate does not verify.",
    ),
    ((aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, aiohttp.InvalidURL), NOT_FETCHED),
    ((aiohttp.ClientError, OSError, ValueError), "The image's server broke off or did not answer in HTTP."),
)


@dataclass(frozen=True)
class FetchConfig:
    """What may be fetched, and what a fetch may cost.

    Without *allowed_domains* every public host is allowed; else exact names and `*.suffix`. *allowed_networks* are
    CIDRs of private hosts to allow, on every port. Files are read under *local_root* only. *timeout_seconds* bounds a
    whole fetch with its redirects, *turn_timeout_seconds* the wait for one of *max_concurrent* turns before it.
    """

    allowed_domains: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    local_root: Path | None = None
    max_bytes: int = 32 << 20
    connect_timeout_seconds: float = 5.0
    timeout_seconds: float = 10.0
    turn_timeout_seconds: float = 10.0
    max_redirects: int = 3
    max_url_characters: int = 8192
    max_concurrent: int = 32


@dataclass(frozen=True)
class Fetched:
    """An encoded picture, and how it may be used again; nothing is sent where *not_modified*: what is known holds."""

    encoded: bytes
    reuse: Reuse
    not_modified: bool = False


class Fetcher:
    """Fetches for one gateway. *outcomes* counts fetches by their end, *num_bytes* what they brought.

    A *resolver* that is given is closed here too; the addresses it names are judged like all others. Raises
    StartupError where *config* names no networks or domains.
    """

    def __init__(self, config: FetchConfig, resolver: AbstractResolver | None = None) -> None:
        self.guard = SocketGuard(config.allowed_networks)
        self.outcomes: Counter[str] = Counter()
        self.num_bytes = 0
        self._config = config
        self._urls = UrlReader(config.allowed_domains, config.max_url_characters)
        self._resolver = resolver or ThreadedResolver(config.max_concurrent)
        self._turns = asyncio.Semaphore(config.max_concurrent)
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Get ready to fetch, in the running event loop."""
        connector = aiohttp.TCPConnector(
            socket_factory=self.guard.open_socket,
            resolver=self._resolver,
            ssl=ssl.create_default_context(),
            use_dns_cache=False,
            limit=0,
        )
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
        """End all connections."""
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

    async def fetch(self, url: str, known: Reuse | None = None) -> Fetched:
        """Return the picture at *url*, or that the *known* one still holds.

        Raises InvalidImageUrl, with one sentence for all that may not be reached or does not answer; ImageTooLarge;
        QueueFull where too many others are being fetched.
        """
        try:
            target = self._urls.read(url)
            if target.scheme == "file":
                fetched = await self._read_file(target)
            else:
                async with self._turn():
                    fetched = await self._follow(target, known)
        except (InvalidImageUrl, ImageTooLarge, QueueFull) as error:
            self.outcomes[error.code] += 1
            raise
        self.outcomes["not_modified" if fetched.not_modified else "ok"] += 1
        self.num_bytes += len(fetched.encoded)
        return fetched

    async def _read_file(self, url: URL) -> Fetched:
        root = self._config.local_root
        if root is None:
            raise InvalidImageUrl(NOT_FETCHED)
        encoded = await asyncio.to_thread(read_local_file, url, root, self._config.max_bytes)
        return Fetched(encoded, Reuse(str(url), {}, is_forbidden=True))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        limit_seconds = self._config.timeout_seconds
        try:
            async with asyncio.timeout(self._config.turn_timeout_seconds):
                await self._turns.acquire()
        except TimeoutError:
            raise QueueFull("Too many images are being fetched; try again later.") from None
        try:
            async with asyncio.timeout(limit_seconds):
                yield
        except TimeoutError:
            raise InvalidImageUrl(
                f"The image's server is too slow: an image must arrive within {limit_seconds:g} seconds."
            ) from None
        finally:
            self._turns.release()

    async def _follow(self, url: URL, known: Reuse | None) -> Fetched:
        fresh_seconds = math.inf
        for _ in range(self._config.max_redirects + 1):
            outcome = await self._ask(url, known if known is not None and known.url == str(url) else None)
            if isinstance(outcome, Fetched):
                return replace(outcome, reuse=outcome.reuse.at_most(fresh_seconds))
            location, seconds = outcome
            fresh_seconds = min(fresh_seconds, seconds)
            url = self._urls.follow(url, location)
        raise InvalidImageUrl(f"The image's URL redirects more than {self._config.max_redirects} times.")

    async def _ask(self, url: URL, known: Reuse | None) -> Fetched | tuple[str, float]:
        """Return what *url* answers: a picture, or where else to look and how long that holds."""
        if self._session is None:
            raise RuntimeError("start() comes before fetch().")
        started = time.monotonic()
        headers = known.conditions if known else {}
        try:
            async with self._session.get(url, headers=headers, allow_redirects=False) as response:
                try:
                    return await self._read(response, url, known, started)
                finally:
                    if not response.content.is_eof():
                        response.close()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise InvalidImageUrl(next(text for kinds, text in _TROUBLES if isinstance(error, kinds))) from None

    async def _read(
        self, response: aiohttp.ClientResponse, url: URL, known: Reuse | None, started: float
    ) -> Fetched | tuple[str, float]:
        headers = {name.lower(): ", ".join(response.headers.getall(name)) for name in response.headers}
        if response.status in REDIRECTS and "location" in headers:
            return headers["location"], redirect_fresh_seconds(response.status, headers, time.time())
        is_known = response.status == 304 and known is not None
        if response.status != 200 and not is_known:
            raise InvalidImageUrl(f"The image's server answered with status {response.status}.")
        reuse = reuse_of(str(url), headers, time.time(), time.monotonic() - started, known if is_known else None)
        if is_known:
            return Fetched(b"", reuse, not_modified=True)
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise InvalidImageUrl("The image's server sent it compressed, though it was asked not to.")
        return Fetched(await self._body(response), reuse)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body, counted as it comes: what its header says of its length is only good for giving up."""
        limit_bytes = self._config.max_bytes
        body = bytearray()
        if (response.content_length or 0) <= limit_bytes:
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > limit_bytes:
                    break
            else:
                return bytes(body)
        raise ImageTooLarge(f"The image at the URL has more than {limit_bytes} bytes, which is the limit.")
