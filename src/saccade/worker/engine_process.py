"""Runs the engine process: starts it by module name, watches its heartbeat, and restarts it with back-off."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType

from saccade.errors import StartupError
from saccade.processes import supervision
from saccade.protocol.engine_ipc import (
    EngineFailed,
    EngineMessage,
    EngineProgress,
    EngineReady,
    EngineStep,
    FrontMessage,
    Shutdown,
)
from saccade.transport.engine_channel import FrontChannel
from saccade.transport.framing import UNREADABLE

ENVIRONMENT = MappingProxyType(
    {
        "GOMP_SPINCOUNT": "10000",
        "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824"
        ":glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1",
    }
)
"""Environment variables of an engine, unless the operator has set them.

OpenMP's threads spin while they wait for one another. If another process occupies the core of one thread, the other
threads would spin until that thread runs again, many times in every step. With GOMP_SPINCOUNT they sleep after a
fraction of a millisecond (docs/decisions/004). GLIBC_TUNABLES keeps the memory of activations in the process: returned
to the system after every prompt, each of its pages would be faulted in again by the next prompt. It also asks for huge
pages, since each step on a CPU reads all weights, and looks up the address of each page. With one arena, any thread can
reuse what others have freed while weights are loaded.
"""


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long an engine may take between two iterations, between two reports while it loads, and to exit."""

    silence_seconds: float = 30.0
    loading_seconds: float = 3600.0
    exit_seconds: float = 5.0


TIMEOUTS = Timeouts()


class EngineProcess:
    """Keeps one engine running. *command* starts it, with `--fd N` added: its end of the channel to the front.

    Once an engine has been ready, any engine that dies, or makes no progress for longer than *timeouts* allows, is
    replaced. *on_message* gets every message from an engine except EngineFailed. When a ready engine ends, its requests
    end too, and *on_lost* gets a sentence that says why. Neither callback may block.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_message: Callable[[EngineMessage], None],
        on_lost: Callable[[str], None],
        timeouts: Timeouts = TIMEOUTS,
    ) -> None:
        self.pid: int | None = None
        self._command = tuple(command)
        self._on_message = on_message
        self._on_lost = on_lost
        self._timeouts = timeouts
        self._channel: FrontChannel | None = None
        self._ready = False
        self._was_ready = False
        self._iteration = -1
        self._moved_at = 0.0
        self._failure: str | None = None

    async def run(self) -> None:
        """Run engines one after another until cancelled. Raises StartupError if the first cannot start."""
        await supervision.keep_running(self._live)

    def send(self, message: FrontMessage) -> None:
        """Queue a message. While no engine is ready it is dropped, because no request is open."""
        if self._channel is not None and self._ready:
            self._channel.send(message)

    async def _live(self) -> str:
        """Start one engine and pass on its messages until it ends.

        Return the reason as a sentence. If no engine has been ready yet, raise StartupError with that sentence.
        """
        front, engine = socket.socketpair()
        with engine:
            process = await supervision.start_process(
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
            sentence = self._failure or f"The engine {supervision.ending(process.returncode)}."
            if was_ready:
                self._on_lost(sentence)
        if not self._was_ready:
            raise StartupError(sentence)
        return sentence

    def _take(self, message: EngineMessage) -> None:
        match message:
            case EngineFailed(message=sentence):
                self._failure = sentence
                return
            case EngineStep(iteration=iteration):
                if iteration != self._iteration:
                    self._iteration, self._moved_at = iteration, time.monotonic()
            case EngineReady():
                self._ready = self._was_ready = True
                self._moved_at = time.monotonic()
            case EngineProgress():
                self._moved_at = time.monotonic()
        self._on_message(message)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Kill the engine if it makes no progress; this closes its channel."""
        while True:
            limit = self._timeouts.silence_seconds if self._ready else self._timeouts.loading_seconds
            remaining = self._moved_at + limit - time.monotonic()
            if remaining <= 0:
                self._failure = f"The engine stood still for {limit:.0f} s and was killed."
                supervision.send_signal(process, signal.SIGKILL)
                return
            await asyncio.sleep(min(remaining, 1.0))

    async def _end(self, process: asyncio.subprocess.Process, channel: FrontChannel) -> None:
        """Ask the engine to exit, and kill it if it still runs after timeouts.exit_seconds."""
        with contextlib.suppress(OSError):
            channel.send(Shutdown())
        try:
            await supervision.end_process(process, self._timeouts.exit_seconds)
        finally:
            channel.close()
            self.pid = None
