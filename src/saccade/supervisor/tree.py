"""The process tree: who is started, what follows a death, in which order all end."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence

from saccade.errors import StartupError
from saccade.supervisor.child import Child, ChildSpec
from saccade.transport import shared_memory

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Tree:
    """Runs the programs of *specs* until a signal comes, then ends them one after another in the order given.

    Until *until_ready* has returned, the death of any of them ends the start; afterwards each is restarted with
    back-off and its death harms no other. Once a signal has come, none is restarted; a second one kills all at once.
    If this process dies, all get SIGTERM.
    """

    def __init__(self, specs: Sequence[ChildSpec], until_ready: Callable[[], Awaitable[None]]) -> None:
        self.ready = False
        self._until_ready = until_ready
        self._interrupted = asyncio.Event()
        self.children = [Child(spec, lambda: self.ready and not self._interrupted.is_set()) for spec in specs]

    async def run(self) -> int:
        """Run until a signal and return 0.

        Where a program ends before all are ready: return its exit code if it has printed its own error, else raise
        StartupError.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._interrupt)
        running = [asyncio.create_task(child.run(), name=child.spec.name) for child in self.children]
        try:
            code = await self._start(running)
            if code == 0:
                await self._interrupted.wait()
            return code
        finally:
            await self._drain(running)
            for number in SIGNALS:
                loop.remove_signal_handler(number)
            shared_memory.sweep()

    async def _start(self, running: Sequence[asyncio.Task[int]]) -> int:
        """Return 0 once all are ready or a signal has come, else the code of a program that has printed its error."""
        starting = asyncio.ensure_future(self._until_ready())
        interrupted = asyncio.create_task(self._interrupted.wait())
        try:
            await asyncio.wait((starting, interrupted, *running), return_when=asyncio.FIRST_COMPLETED)
            for child, life in zip(self.children, running, strict=True):
                if life.done():
                    return _reported(child.spec, life.result())
            if starting.done():
                starting.result()
                self.ready = True
            return 0
        finally:
            for task in (starting, interrupted):
                task.cancel()
            await asyncio.gather(starting, interrupted, return_exceptions=True)

    async def _drain(self, running: Sequence[asyncio.Task[int]]) -> None:
        for child in self.children:
            await child.stop()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _interrupt(self) -> None:
        if self._interrupted.is_set():
            for child in self.children:
                child.kill()
        self._interrupted.set()


def _reported(spec: ChildSpec, code: int) -> int:
    """Return *code*, with which the program of *spec* has ended, if the terminal says why. Raises StartupError."""
    if code in spec.error_codes:
        return code
    ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    raise StartupError(f"The {spec.name} {ending} before it was ready.")


async def until(check: Callable[[], Awaitable[bool]], every_seconds: float = 0.1) -> None:
    """Return when *check* says yes."""
    while not await check():  # noqa: ASYNC110  what is asked lives in another process
        await asyncio.sleep(every_seconds)


async def answers_ready(host: str, port: int) -> bool:
    """Whether GET /ready at *host*:*port* answers 200 (HTTP/1.0, by hand: the supervisor needs no HTTP client)."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /ready HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                return (await reader.readline()).split()[1:2] == [b"200"]
            finally:
                writer.close()
    return False
