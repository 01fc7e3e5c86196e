"""The engine process: spawned by module name, watched by heartbeat, restarted with back-off."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol

from saccade.errors import StartupError
from saccade.protocol.description import Description
from saccade.protocol.local import (
    CacheEvents,
    EngineFailed,
    EngineMessage,
    EngineProgress,
    EngineReady,
    EngineStep,
    FrontMessage,
    Shutdown,
)
from saccade.transport import lifeline
from saccade.transport.backoff import Backoff
from saccade.transport.framing import UNREADABLE
from saccade.transport.local import FrontChannel

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long an engine may be silent between two iterations, may take to load, and may take to go."""

    silence_seconds: float = 30.0
    loading_seconds: float = 3600.0
    exit_seconds: float = 5.0


PATIENCE = Patience()

ENVIRONMENT = MappingProxyType(
    {
        "GOMP_SPINCOUNT": "10000",
        "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824",
    }
)
"""What an engine finds in its environment unless the operator has set it.

OpenMP's threads spin while they wait for one another: where some other process has the core of one, the others would
burn theirs until it gets it back, many times in every step. After so many turns, a fraction of a millisecond, they
sleep (docs/decisions/004). On a CPU, activations are malloc's: given back to the system after every prompt, each of
their pages would be faulted in anew by the next.
"""


class EngineListener(Protocol):
    """Who hears of an engine's life. Nothing here blocks."""

    def progress(self, message: EngineProgress) -> None:
        """Loading goes on."""

    def ready(self, description: Description) -> None:
        """The engine takes requests."""

    def step(self, message: EngineStep) -> None:
        """One step, or one heartbeat."""

    def events(self, message: CacheEvents) -> None:
        """What the engine's caches hold, for some of those who watch them."""

    def lost(self, sentence: str) -> None:
        """The engine that was ready is gone, with everything it was working on; another will be started."""


class EngineProcess:
    """Keeps one engine running: *command* and `--fd N`, where N is its end of the local channel.

    An engine that dies, or whose iterations stand still for longer than *patience* allows, is replaced.
    """

    def __init__(self, command: Sequence[str], listener: EngineListener, patience: Patience = PATIENCE) -> None:
        self.pid: int | None = None
        self._command = tuple(command)
        self._listener = listener
        self._patience = patience
        self._channel: FrontChannel | None = None
        self._ready = False
        self._was_ready = False
        self._iteration = -1
        self._moved_at = 0.0
        self._failure: str | None = None

    async def run(self) -> None:
        """Run engines one after another until cancelled. Raises StartupError where the first cannot start."""
        backoff = Backoff()
        while True:
            backoff.started()
            sentence = await self._live()
            if not self._was_ready:
                raise StartupError(sentence)
            logger.error("%s It is started again.", sentence)
            await asyncio.sleep(backoff.after_failure())

    def send(self, message: FrontMessage) -> None:
        """Queue a message; while no engine is ready it is dropped, because nobody's request is open then."""
        if self._channel is not None and self._ready:
            self._channel.send(message)

    def lend(self, number: int, descriptor: int) -> None:
        """Have the engine write to a stream by itself. Raises OSError where it can take none."""
        if self._channel is not None and self._ready:
            self._channel.lend(number, descriptor)

    async def _live(self) -> str:
        """Start one engine and relay what it says until it ends; return the sentence that tells why it did."""
        front, engine = socket.socketpair()
        with engine:
            process = await lifeline.start(
                [*self._command, "--fd", str(engine.fileno())],
                signal_at_parents_death=signal.SIGKILL,
                pass_fds=(engine.fileno(),),
                environment={**ENVIRONMENT, **os.environ},
            )
        self._channel = FrontChannel(self._take)
        self.pid, self._ready, self._failure, self._moved_at = process.pid, False, None, time.monotonic()
        watch = asyncio.create_task(self._watch(process))
        try:
            await self._channel.open(front)
            await self._channel.ended()
        except UNREADABLE:
            self._failure = "The engine sent a message that is not of this version of Saccade."
        finally:
            watch.cancel()
            was_ready, self._ready = self._ready, False
            await self._end(process, self._channel)
            sentence = self._failure or f"The engine {_ending(process.returncode)}."
            if was_ready:
                self._listener.lost(sentence)
        return sentence

    def _take(self, message: EngineMessage) -> None:
        match message:
            case EngineStep(iteration=iteration):
                if iteration != self._iteration:
                    self._iteration, self._moved_at = iteration, time.monotonic()
                self._listener.step(message)
            case CacheEvents():
                self._listener.events(message)
            case EngineReady(description=description):
                self._ready = self._was_ready = True
                self._moved_at = time.monotonic()
                self._listener.ready(description)
            case EngineProgress():
                self._moved_at = time.monotonic()
                self._listener.progress(message)
            case EngineFailed(message=sentence):
                self._failure = sentence

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill an engine that stands still; its channel closes, and that ends its life."""
        while True:
            limit = self._patience.silence_seconds if self._ready else self._patience.loading_seconds
            left = self._moved_at + limit - time.monotonic()
            if left <= 0:
                self._failure = f"The engine stood still for {limit:.0f} s and was killed."
                _kill(process)
                return
            await asyncio.sleep(min(left, 1.0))

    async def _end(self, process: asyncio.subprocess.Process, channel: FrontChannel) -> None:
        """Leave no process behind: ask, wait, kill."""
        with contextlib.suppress(OSError):
            channel.send(Shutdown())
        try:
            async with asyncio.timeout(self._patience.exit_seconds):
                await process.wait()
        except TimeoutError:
            pass
        finally:
            channel.close()
            _kill(process)
            await process.wait()
            self.pid = None


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
