"""The process tree: which programs start, what happens when one dies, and in which order they end."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

from saccade.errors import StartupError
from saccade.processes import supervision
from saccade.transport import lasting_task, shared_memory
from saccade.transport.local_calls import BEAT, CallClient, NotReached

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)

BEAT_SECONDS, MAX_MISSED_BEATS = 5.0, 6
"""How often a program is asked whether its event loop turns, and after how many questions in a row without an answer
it is killed. A worker gives its engine as long.
"""

EXIT_NOT_STARTED = 126
"""What shells return if a program cannot be run."""


@dataclasses.dataclass(frozen=True)
class ChildSpec:
    """A program to start, and how long it may take to end after SIGTERM.

    - environment: None stands for this process's own.
    - error_codes: exit codes with which the program has printed its own error.
    - ends_with_previous: whether it gets SIGTERM together with the program before it, or only after that has ended.
    - beats_at: a socket at which the program runs a local_calls.CallServer, on the event loop that does its work.
    """

    name: str
    command: Sequence[str]
    stop_seconds: float = 10.0
    environment: Mapping[str, str] | None = None
    error_codes: Collection[int] = ()
    ends_with_previous: bool = False
    beats_at: Path | None = None


class Child:
    """Keeps the program of *spec* running until stop().

    *may_restart* is called whenever the program ends; if it returns False, run() ends. The program gets SIGTERM when
    this process dies, so that it can still clean up.
    """

    def __init__(self, spec: ChildSpec, may_restart: Callable[[], bool] = lambda: True) -> None:
        self.spec = spec
        self._may_restart = may_restart
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._code = 0

    @property
    def pid(self) -> int | None:
        """The program's process id while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    async def run(self) -> int:
        """Run the program, and start it again whenever it ends. Return its last exit code (negative: a signal)."""
        await supervision.keep_running(self._live)
        return self._code

    async def _live(self) -> str | None:
        """Run the program once; return how it ended, or None if it must not be started again."""
        if self._stopping:
            return None
        try:
            self._process = await supervision.start_process(
                self.spec.command, signal_at_parents_death=signal.SIGTERM, environment=self.spec.environment
            )
        except OSError as error:
            logger.error("%s cannot be started: %s", self.spec.name, error.strerror)
            self._code = EXIT_NOT_STARTED
        else:
            if self._stopping:
                self.kill()
            watch = asyncio.create_task(self._watch(self._process))
            try:
                self._code = await self._process.wait()
            finally:
                await lasting_task.end(watch)
        if self._stopping or not self._may_restart():
            return None
        return f"The {self.spec.name} {supervision.ending(self._code)}."

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill *process* if it has answered once but no longer does, because it is stopped or its event loop hangs.

        This counts missed answers and not seconds, so a pause of this process counts at most once.
        """
        if self.spec.beats_at is None:
            return
        client = CallClient(self.spec.beats_at)
        client.start()
        has_answered, num_missed = False, 0
        try:
            while num_missed < MAX_MISSED_BEATS:
                beat = asyncio.create_task(asyncio.sleep(BEAT_SECONDS))
                try:
                    await client.call(BEAT, BEAT_SECONDS)
                    has_answered, num_missed = True, 0
                except NotReached:
                    num_missed += has_answered
                await beat
        finally:
            await client.close()
        if not self._stopping:
            logger.error(
                "The %s has not answered for %g s and is killed.", self.spec.name, BEAT_SECONDS * MAX_MISSED_BEATS
            )
            supervision.send_signal(process, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask the program to end, and kill it if it takes too long."""
        self._stopping = True
        if self._process is not None:
            supervision.send_signal(self._process, signal.SIGTERM)
            await supervision.end_process(self._process, self.spec.stop_seconds)

    def kill(self) -> None:
        self._stopping = True
        if self._process is not None:
            supervision.send_signal(self._process, signal.SIGKILL)


class Tree:
    """Runs the programs of *specs* until a signal comes, then ends them in the order of *specs*.

    If a program ends before *until_ready* has returned, the start fails. Afterwards a program that ends is restarted
    with back-off, and the others run on. After a signal no program is restarted; a second signal kills all at once. If
    this process dies, all programs get SIGTERM.
    """

    def __init__(self, specs: Sequence[ChildSpec], until_ready: Callable[[], Awaitable[None]]) -> None:
        self.ready = False
        self._until_ready = until_ready
        self._interrupted = asyncio.Event()
        self.children = [Child(spec, lambda: self.ready and not self._interrupted.is_set()) for spec in specs]

    async def run(self) -> int:
        """Run until a signal and return 0.

        If a program ends before all are ready, return its exit code if it has printed its own error. Otherwise raise
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
            await lasting_task.end(starting, interrupted)

    async def _drain(self, running: Sequence[asyncio.Task[int]]) -> None:
        together: list[list[Child]] = []
        for child in self.children:
            if child.spec.ends_with_previous and together:
                together[-1].append(child)
            else:
                together.append([child])
        for children in together:
            await asyncio.gather(*(child.stop() for child in children))
        await lasting_task.end(*running)

    def _interrupt(self) -> None:
        if self._interrupted.is_set():
            for child in self.children:
                child.kill()
        self._interrupted.set()


def _reported(spec: ChildSpec, code: int) -> int:
    """Return the exit code *code* if the program of *spec* has printed the reason. Raises StartupError otherwise."""
    if code in spec.error_codes:
        return code
    raise StartupError(f"The {spec.name} {supervision.ending(code)} before it was ready.")


async def until(check: Callable[[], Awaitable[bool]], every_seconds: float = 0.1) -> None:
    """Return when *check* returns True."""
    while not await check():  # noqa: ASYNC110  the condition holds in another process
        await asyncio.sleep(every_seconds)


async def answers_ready(host: str, port: int, *, uds: Path | None = None, over_tls: bool = False) -> bool:
    """Whether GET /ready at *host*:*port*, or at the socket *uds*, answers 200.

    It speaks HTTP/1.0 by hand, so that the supervisor needs no HTTP client. A server that requires certificates answers
    nothing after the handshake, which counts as ready.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if over_tls else None
    if context is not None:  # its own child, under any name
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5.0):
            if uds is None:
                reader, writer = await asyncio.open_connection(host, port, ssl=context)
            else:
                reader, writer = await asyncio.open_unix_connection(
                    uds, ssl=context, server_hostname=host if over_tls else None
                )
            try:
                writer.write(f"GET /ready HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
                line = await reader.readline()
                return line.split()[1:2] == [b"200"] or (over_tls and not line)
            finally:
                writer.close()
    return False
