"""Host names to addresses, in threads of their own: a name server that never answers must not hold up others' work."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

from aiohttp.abc import AbstractResolver, ResolveResult


class ThreadedResolver(AbstractResolver):
    """Asks the operating system with at most *num_threads* questions at a time."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="resolve")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the addresses of *host*. Raises OSError."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(
                self._threads, lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
            )
        except UnicodeError as error:
            raise OSError("The host's name cannot be looked up.") from error
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Start no more questions; those under way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
