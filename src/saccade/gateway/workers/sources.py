"""Sources of worker urls while a gateway runs: a file, and the DNS name of a headless service."""

import asyncio
import ipaddress
import logging
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from saccade.errors import StartupError
from saccade.gateway.config import SourceConfig
from saccade.gateway.workers.connectors import check_url, targets
from saccade.gateway.workers.discovery import Discovery
from saccade.media.resolver import DnsResolver
from saccade.watched_file import WatchedFile

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
    """The urls in the file at *path*, one a line; empty lines and comments after # are ignored.

    The file is read whenever its time, size or inode changes. A malformed line is logged by its number and left out. If
    the file cannot be read or has no url, its last urls stay in use: it may be half written. A file with comments alone
    means no workers.
    """

    def __init__(self, path: Path, every_seconds: float = FILE_SECONDS) -> None:
        self.name = "--workers-file"
        self.fault = ""
        self._path = path
        self._every_seconds = every_seconds

    async def urls(self) -> AsyncGenerator[tuple[str, ...], None]:
        """Yield the urls, and again whenever the file has changed."""
        # A generator that starts again after an unforeseen error must read the file again.
        file, content_fault = WatchedFile(self._path, MAX_FILE_BYTES), ""
        while True:
            urls = None
            try:
                if (content := await asyncio.to_thread(file.read)) is not None:
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


def _urls(content: bytes) -> tuple[tuple[str, ...] | None, str]:
    """Return the urls in *content*, or None and why it cannot be used; log the numbers of malformed lines."""
    try:
        lines = [line.partition("#") for line in content.decode().splitlines()]
    except UnicodeDecodeError:
        return None, "it is not text in UTF-8"
    urls = []
    for number, (before, _, _) in enumerate(lines, 1):
        if not (url := before.strip()):
            continue
        try:
            check_url(url)
        except StartupError as error:
            logger.error("--workers-file: line %d is left out: %s", number, error.message)
        else:
            urls.append(url)
    is_meant = any(hash_sign for _, hash_sign, _ in lines) and not any(before.strip() for before, _, _ in lines)
    if not urls and not is_meant:
        return None, "it has no worker's URL; a file with a comment alone, such as `# none`, means no worker"
    return tuple(urls), ""


class WorkersDns:
    """A worker at every address of the host of *url*: *url* with the address in place of the host.

    If the name has IPv4 addresses, its IPv6 addresses are assumed to lead to the same workers. If the look-up fails or
    finds nothing, the last addresses stay in use. Raises StartupError.
    """

    def __init__(self, url: str, resolver: DnsResolver | None = None) -> None:
        check_dns_url(url)
        self.name = f"--worker-dns {url}"
        self._parts = urlsplit(url)
        self._resolver = resolver or DnsResolver()
        self.fault = ""

    async def urls(self) -> AsyncGenerator[tuple[str, ...], None]:
        """Yield the urls, and again whenever the addresses have changed."""
        last: tuple[str, ...] = ()
        while True:
            urls, wait_seconds = await self.look_up()
            if urls and urls != last:
                last = urls
                yield urls
            await asyncio.sleep(wait_seconds)

    async def look_up(self) -> tuple[tuple[str, ...], float]:
        """Return the workers' urls, none if the look-up failed, and the seconds until the next look-up."""
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


async def find_workers(members: Discovery, urls: Sequence[str], sources: SourceConfig) -> None:
    """Connect to the workers at *urls*, and follow *sources*. Raises StartupError if *urls* has half of a pair."""
    if not sources:
        targets(urls)
    await members.replace(FLAGS, urls)
    if sources.file is not None:
        members.follow(WorkersFile(sources.file))
    for url in sources.dns:
        members.follow(WorkersDns(url))
