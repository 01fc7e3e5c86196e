"""Decides which workers there are: the worker pool has those that at least one source wants.

The sources that may change while a gateway runs are a file, the DNS name of a headless service, and the admin port.
"""

import asyncio
import dataclasses
import ipaddress
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from saccade.errors import StartupError
from saccade.fleet.address import check_url, is_half, targets, worker_urls
from saccade.fleet.pool import WorkerPool
from saccade.fleet.settings import SourceConfig
from saccade.fleet.traffic import ORDINARY, WorkerTraffic, read_traffic
from saccade.fleet.worker import Worker
from saccade.media.resolver import DnsResolver
from saccade.transport import lasting_task
from saccade.watched_file import WatchedFile

POLL_SECONDS = 0.05
"""Between two checks whether a leaving worker still has requests."""

FLAGS = "--worker-url"
"""The name of the source that never changes."""

FILE_SECONDS = 1.0
"""Between two checks of a file."""

MAX_FILE_BYTES = 1 << 20

MIN_DNS_SECONDS = 5.0
MAX_DNS_SECONDS = 60.0
"""A name is looked up again after its records' time to live, within these bounds."""

DNS_SCHEMES = ("grpc", "tokenspeed", "sglang", "vllm")
"""Without TLS: certificates are for names, and the gateway connects to the name's addresses."""

logger = logging.getLogger(__name__)


class WorkersFile:
    """The urls in the file at *path*, one on each line; empty lines and comments after # are ignored.

    A url may be followed by its worker's options, such as `weight=0.5 share=10% cordoned`. The file is read whenever
    its modification time, size or inode changes. A malformed line is logged by its number and left out. If the file
    cannot be read or has no url, its last urls stay in use: it may be half written. A file with only comments means no
    workers.
    """

    def __init__(self, path: Path, every_seconds: float = FILE_SECONDS) -> None:
        self.name = "--workers-file"
        self.fault = ""
        self._path = path
        self._every_seconds = every_seconds

    async def urls(self) -> AsyncGenerator[Mapping[str, WorkerTraffic], None]:
        """Yield the urls with their workers' traffic, and again whenever the file has changed."""
        # A generator that starts again after an unforeseen error must read the file again.
        file, content_fault = WatchedFile(self._path, MAX_FILE_BYTES), ""
        while True:
            urls = None
            try:
                if (content := await asyncio.to_thread(file.read_content)) is not None:
                    urls, content_fault = await asyncio.to_thread(_urls, content)
                self._note(content_fault)
            except StartupError as error:
                self._note(error.message)
            if urls is not None:
                yield urls
            await asyncio.sleep(self._every_seconds)

    def _note(self, fault: str) -> None:
        """Log a *fault* of the file, once."""
        if fault and fault != self.fault:
            logger.error("--workers-file %s is not used, its last workers stay: %s", self._path, fault)
        self.fault = fault


def _urls(content: bytes) -> tuple[Mapping[str, WorkerTraffic] | None, str]:
    """Return the urls in *content* with their workers' traffic, or None and why it cannot be used.

    The numbers of malformed lines are logged.
    """
    try:
        lines = [line.partition("#") for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        return None, "it is not text in UTF-8"
    urls: dict[str, WorkerTraffic] = {}
    for number, (before, _, _) in enumerate(lines, 1):
        if not before.strip():
            continue
        try:
            url, traffic = _read_line(before)
        except StartupError as error:
            logger.error("--workers-file: line %d is left out: %s", number, error.message)
        else:
            urls[url] = traffic
    is_meant = any(hash_sign for _, hash_sign, _ in lines) and not any(before.strip() for before, _, _ in lines)
    if not urls and not is_meant:
        return None, "it has no worker's URL; a file with a comment alone, such as `# none`, means no worker"
    return urls, ""


def _read_line(line: str) -> tuple[str, WorkerTraffic]:
    """Return the url in *line* and its worker's traffic. Raises StartupError."""
    url, *options = line.split()
    check_url(url)
    traffic = read_traffic(options)
    if options and is_half(url):
        raise StartupError("One side of pairs has no options: give the pair as one URL, with ?prefill=HOST:PORT.")
    return url, traffic


class WorkersDns:
    """A worker at every address of *url*'s host. Its url is *url* with the address in place of the host.

    If the name has IPv4 addresses, its IPv6 addresses are assumed to lead to the same workers. If the look-up fails or
    finds nothing, the last addresses stay in use. Raises StartupError for a url that check_dns_url() refuses.
    """

    def __init__(self, url: str, resolver: DnsResolver | None = None) -> None:
        check_dns_url(url)
        self.name = f"--worker-dns {url}"
        self._parts = urlsplit(url)
        self._resolver = resolver or DnsResolver()
        self.fault = ""

    async def urls(self) -> AsyncGenerator[Mapping[str, WorkerTraffic], None]:
        """Yield the urls, with ordinary traffic, and again whenever the addresses have changed."""
        last: tuple[str, ...] = ()
        while True:
            urls, wait_seconds = await self.look_up()
            if urls and urls != last:
                last = urls
                yield dict.fromkeys(urls, ORDINARY)
            await asyncio.sleep(wait_seconds)

    async def look_up(self) -> tuple[tuple[str, ...], float]:
        """Return the workers' urls, which are empty if the look-up failed, and the seconds until the next look-up."""
        try:
            records = await self._resolver.records(self._parts.hostname or "")
        except OSError:
            self._note("the name cannot be looked up")
            return (), MIN_DNS_SECONDS
        self._note("" if records.addresses else "the name has no address")
        wait_seconds = min(max(MIN_DNS_SECONDS, records.seconds_to_live), MAX_DNS_SECONDS)
        return tuple(self._at(address) for address in sorted(records.addresses)), wait_seconds

    def _note(self, fault: str) -> None:
        """Log a *fault* of the look-up, once."""
        if fault and fault != self.fault:
            logger.error("%s: %s; its last workers stay", self.name, fault)
        self.fault = fault

    def _at(self, address: str) -> str:
        host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
        return self._parts._replace(netloc=f"{host}:{self._parts.port}").geturl()


def check_dns_url(url: str) -> None:
    """Raise StartupError unless *url* has a scheme without TLS, a host and a port."""
    parts = urlsplit(url)
    if parts.scheme not in DNS_SCHEMES:
        raise StartupError(
            f"--worker-dns takes grpc://HOST:PORT, or tokenspeed://, sglang:// or vllm://, not {url!r}. A worker with "
            "TLS has a certificate for its name, so it is given by --worker-url or --workers-file."
        )
    check_url(url)


Source = WorkersFile | WorkersDns
"""A source of worker urls. Its *name* is that in logs and errors.

*fault* says why its current content is not used, "" if it is; meanwhile its last urls stay in use.
"""


@dataclass
class _Leaving:
    """The clients of a removed target. Once *is_closing*, it is too late to take them back."""

    clients: Sequence[Worker]
    task: asyncio.Task[None] | None = None
    is_closing: bool = False


class Discovery:
    """Keeps *worker_pool* to the workers of the sources; one that several sources name stays until all drop it.

    A dropped worker gets no new requests. Its connection is closed once *num_requests* of its url is zero, or after
    *drain_seconds*, which fails the requests that still run there. If a source wants it again before that, it is taken
    back as it is. *sources* are the followed sources.
    """

    def __init__(self, worker_pool: WorkerPool, num_requests: Callable[[str], int], drain_seconds: float) -> None:
        self.worker_pool = worker_pool
        self._num_requests = num_requests
        self._drain_seconds = drain_seconds
        self._urls: dict[str, Mapping[str, WorkerTraffic]] = {}
        self._clients: dict[str, tuple[Worker, ...]] = {}
        self._leaving: dict[str, _Leaving] = {}
        self.sources: list[Source] = []
        self._following: list[asyncio.Task[None]] = []
        self._turn = asyncio.Lock()

    def follow(self, source: Source) -> None:
        """Follow *source* until close()."""
        self.sources.append(source)
        self._following.append(lasting_task.begin(lambda: self._follow(source), f"workers of {source.name}"))

    def sources_of(self, url: str) -> tuple[str, ...]:
        """Return the names of the sources that want the worker at *url*."""
        return tuple(name for name, urls in self._urls.items() if url in urls)

    async def want(self, source: str, url: str) -> None:
        """Add *url*, which is well formed, to the urls of *source*."""
        await self.replace(source, {**self._urls.get(source, {}), url: ORDINARY})

    async def drop(self, source: str, url: str) -> None:
        """Remove *url* from the urls of *source*."""
        await self.replace(source, {one: traffic for one, traffic in self._urls.get(source, {}).items() if one != url})

    async def replace(self, source: str, urls: Mapping[str, WorkerTraffic]) -> None:
        """Replace the urls of *source*, and their workers' traffic, with *urls*.

        A url for which no client can be made is logged.
        """
        self._urls[source] = urls
        # Before its worker is added: a canary gets none of the others' conversations.
        self.worker_pool.direct(dataclasses.replace(self.worker_pool.traffic, lists=self._traffic()))
        # The tasks of a worker outlive the request that adds it, so their log lines must not have the request's id.
        await asyncio.create_task(self._apply(), name=f"workers of {source}", context=Context())

    async def close(self) -> None:
        """Stop following sources and waiting for leaving workers; the pool closes their clients."""
        await lasting_task.end(*self._following, *(one.task for one in self._leaving.values()))

    async def _follow(self, source: Source) -> None:
        async with aclosing(source.urls()) as changes:
            async for urls in changes:
                await self.replace(source.name, urls)

    async def _apply(self) -> None:
        """Add and remove workers until the pool matches the sources."""
        async with self._turn:
            goal = self._targets()
            for target in [one for one in self._clients if one not in goal]:
                self._remove(target)
            for target in goal:
                if target not in self._clients:
                    await self._add(target)

    def _traffic(self) -> dict[str, WorkerTraffic]:
        """Return the traffic of the workers whose traffic a source lists, by their urls.

        The workers of one url, which are data-parallel ranks, divide its share.
        """
        traffic: dict[str, WorkerTraffic] = {}
        for urls in self._urls.values():
            for url, listed in urls.items():
                if listed != ORDINARY:
                    workers = worker_urls(url)
                    traffic |= dict.fromkeys(workers, listed.part(len(workers)))
        return traffic

    def _targets(self) -> tuple[str, ...]:
        """Return the targets of all urls, without workers that lack their other half."""
        urls = [url for urls in self._urls.values() for url in urls]
        try:
            return targets(urls)
        except StartupError as error:
            logger.warning("%s They are used when both are known.", error.message)
            return targets(url for url in urls if not is_half(url))

    async def _add(self, target: str) -> None:
        leaving = self._leaving.get(target)
        if leaving is not None and leaving.is_closing:
            return  # _let_go() adds it once the old connection is closed.
        if leaving is not None and leaving.task is not None:
            leaving.task.cancel()
            del self._leaving[target]
            self._clients[target] = tuple(leaving.clients)
            for client in leaving.clients:
                self.worker_pool.add(client)
            logger.info("worker %s is added again, and gets requests", target)
            return
        try:
            self._clients[target] = joined = self.worker_pool.join(target)
        except StartupError as error:
            logger.error("worker %s cannot be used: %s", target, error.message)
            return
        logger.info("worker %s is added", target)
        await asyncio.gather(*(client.start() for client in joined))

    def _remove(self, target: str) -> None:
        leaving = _Leaving(self._clients.pop(target))
        for client in leaving.clients:
            self.worker_pool.remove(client)
        self._leaving[target] = leaving
        leaving.task = lasting_task.begin(partial(self._let_go, target, leaving), f"departure of worker {target}")

    async def _let_go(self, target: str, leaving: _Leaving) -> None:
        """Close the clients once their requests have ended or the time is up, and forget them. May be repeated."""
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._idle(leaving.clients)
        except TimeoutError:
            count = sum(self._num_requests(client.url) for client in leaving.clients)
            logger.warning(
                "worker %s is removed with %d unfinished requests, which fail: the time to drain is over", target, count
            )
        leaving.is_closing = True
        await asyncio.gather(*(client.close() for client in leaving.clients))
        await self._idle(leaving.clients)
        for client in leaving.clients:
            await self.worker_pool.forget(client)
        logger.info("worker %s is closed", target)
        if self._leaving.get(target) is leaving:
            del self._leaving[target]
        await self._apply()

    async def _idle(self, clients: Sequence[Worker]) -> None:
        while any(self._num_requests(client.url) for client in clients):  # noqa: ASYNC110  nothing signals the last end
            await asyncio.sleep(POLL_SECONDS)


async def find_workers(discovery: Discovery, urls: Sequence[str], sources: SourceConfig) -> None:
    """Connect to the workers at *urls*, and follow *sources*. Raises StartupError if *urls* has half of a pair."""
    if not sources:
        targets(urls)
    await discovery.replace(FLAGS, dict.fromkeys(urls, ORDINARY))
    if sources.file is not None:
        discovery.follow(WorkersFile(sources.file))
    for url in sources.dns:
        discovery.follow(WorkersDns(url))
