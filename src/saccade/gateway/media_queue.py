"""The order in which pictures are decoded."""

import asyncio
from collections import deque
from collections.abc import Callable

from saccade.errors import SaccadeError
from saccade.gateway.media_server import DecodeProcess


class MediaQueue:
    """Who decodes next: idle processes and free bytes on one side, jobs in order of arrival on the other.

    *lost* is told of a process that died while it was idle.
    """

    def __init__(self, budget_bytes: int, lost: Callable[[DecodeProcess], None]) -> None:
        self.budget_bytes = budget_bytes
        self.in_flight_bytes = 0
        self.num_running = 0
        self._lost = lost
        self._idle: deque[DecodeProcess] = deque()
        self._waiting: deque[tuple[int, asyncio.Future[DecodeProcess]]] = deque()

    @property
    def num_waiting(self) -> int:
        """Jobs that have no process yet."""
        return sum(not turn.done() for _, turn in self._waiting)

    async def enter(self, nbytes: int) -> DecodeProcess:
        """Wait for a process and for *nbytes* of the budget; a job over the whole budget runs alone."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        self._advance()
        try:
            process: DecodeProcess = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.leave(nbytes, turn.result())
            raise
        return process

    def leave(self, nbytes: int, process: DecodeProcess | None) -> None:
        """Give back what enter() gave; a process that is no more is None, and its replacement comes by add()."""
        self.in_flight_bytes -= nbytes
        self.num_running -= 1
        self.add(process)

    def add(self, process: DecodeProcess | None) -> None:
        """Take in an idle process, and let the next jobs begin."""
        if process is not None:
            self._idle.append(process)
        self._advance()

    def refuse(self, error: SaccadeError) -> None:
        """Answer all that wait with *error*."""
        while self._waiting:
            _, turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _advance(self) -> None:
        while self._waiting and self._idle:
            nbytes, turn = self._waiting[0]
            if turn.done():
                self._waiting.popleft()
                continue
            if self.in_flight_bytes and self.in_flight_bytes + nbytes > self.budget_bytes:
                return
            process = self._idle.popleft()
            if not process.alive:
                self._lost(process)
                continue
            self._waiting.popleft()
            self.in_flight_bytes += nbytes
            self.num_running += 1
            turn.set_result(process)
