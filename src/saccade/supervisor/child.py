"""One program that the supervisor keeps running."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Callable, Collection, Mapping, Sequence

from saccade.transport import lifeline
from saccade.transport.backoff import Backoff

logger = logging.getLogger(__name__)

EXIT_NOT_STARTED = 126
"""What shells return where a program cannot be run."""


@dataclasses.dataclass(frozen=True)
class ChildSpec:
    """What to start, and how long it may take to end after SIGTERM. *environment* None means ours.

    *error_codes* are the exit codes before which the program prints its own error.
    """

    name: str
    command: Sequence[str]
    stop_seconds: float = 10.0
    environment: Mapping[str, str] | None = None
    error_codes: Collection[int] = ()


class Child:
    """Keeps the program of *spec* running until stop().

    *may_restart* is asked at every death: False ends run() instead. The program gets SIGTERM when we die, so that it
    can still clean up what it owns.
    """

    def __init__(self, spec: ChildSpec, may_restart: Callable[[], bool] = lambda: True) -> None:
        self.spec = spec
        self._may_restart = may_restart
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The program's process id while it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if self._process is not None and running else None

    async def run(self) -> int:
        """Start the program again whenever it ends; return its last exit code (negative: a signal)."""
        backoff = Backoff()
        while True:
            backoff.started()
            code = await self._live()
            if self._stopping or not self._may_restart():
                return code
            wait_seconds = backoff.after_failure()
            logger.error("%s ended with code %d; it is started again in %.1f s", self.spec.name, code, wait_seconds)
            await asyncio.sleep(wait_seconds)
            if self._stopping:
                return code

    async def _live(self) -> int:
        try:
            self._process = await lifeline.start(
                self.spec.command, signal_at_parents_death=signal.SIGTERM, environment=self.spec.environment
            )
        except OSError as error:
            logger.error("%s cannot be started: %s", self.spec.name, error.strerror)
            return EXIT_NOT_STARTED
        if self._stopping:
            self.kill()
        return await self._process.wait()

    async def stop(self) -> None:
        """Ask the program to end, and kill it when it takes too long."""
        self._stopping = True
        self._signal(signal.SIGTERM)
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.spec.stop_seconds):
                    await self._process.wait()
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End the program at once."""
        self._stopping = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)  # type: ignore[union-attr]
