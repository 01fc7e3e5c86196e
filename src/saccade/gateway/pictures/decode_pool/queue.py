"""Which job a decode process takes next."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from saccade.errors import SaccadeError
from saccade.gateway.pictures.decode_pool.server import DecodeProcess

SHARE_OF_VIDEOS = 0.5
"""The part of the budget of decoded bytes that several videos may take together."""


@dataclass(frozen=True)
class Turn:
    """A job's *process*, and what else it has of the queue until leave()."""

    process: DecodeProcess
    nbytes: int
    is_video: bool


@dataclass(frozen=True)
class _Waiter:
    """A job without a process, and where its turn is put."""

    nbytes: int
    is_video: bool
    turn: asyncio.Future[Turn]


class DecodeQueue:
    """Assigns jobs, in order of arrival, to idle processes while the budget of decoded bytes has room.

    At most *max_videos* of the processes work on videos, which may take half a minute: pictures overtake the others.
    *lost* is called with a process that died while it was idle.
    """

    def __init__(self, budget_bytes: int, max_videos: int, lost: Callable[[DecodeProcess], None]) -> None:
        self.budget_bytes = budget_bytes
        self.in_flight_bytes = 0
        self.num_running = 0
        self._max_videos = max_videos
        self._num_videos = 0
        self._video_bytes = 0
        self._lost = lost
        self._idle: list[DecodeProcess] = []
        self._waiting: list[_Waiter] = []

    @property
    def num_waiting(self) -> int:
        """Jobs that have no process yet."""
        return sum(not waiter.turn.done() for waiter in self._waiting)

    async def enter(self, nbytes: int, *, is_video: bool = False) -> Turn:
        """Wait for a process and for *nbytes* of the budget; a job over the whole budget runs alone."""
        waiter = _Waiter(nbytes, is_video, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._advance()
        try:
            turn: Turn = await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                given = waiter.turn.result()
                self.leave(given, given.process)
            raise
        return turn

    def leave(self, turn: Turn, process: DecodeProcess | None) -> None:
        """End a turn; *process* is None where the process has ended, and its replacement comes by add()."""
        self._count(turn, -1)
        self.add(process)

    def add(self, process: DecodeProcess | None) -> None:
        """Take in an idle process, and let the next jobs begin."""
        if process is not None:
            self._idle.append(process)
        self._advance()

    def refuse(self, error: SaccadeError) -> None:
        """Fail all waiting jobs with *error*."""
        for waiter in self._waiting:
            if not waiter.turn.done():
                waiter.turn.set_exception(error)
        self._waiting.clear()

    def _advance(self) -> None:
        self._waiting = [waiter for waiter in self._waiting if not waiter.turn.done()]
        while self._idle and (waiter := self._next()) is not None:
            process = self._idle.pop(0)
            if not process.alive:
                self._lost(process)
                continue
            self._waiting.remove(waiter)
            turn = Turn(process, waiter.nbytes, waiter.is_video)
            self._count(turn, 1)
            waiter.turn.set_result(turn)

    def _next(self) -> _Waiter | None:
        """Return the first waiting job that may begin; a picture that has no room waits before all later jobs."""
        for waiter in self._waiting:
            has_room = not self.in_flight_bytes or self.in_flight_bytes + waiter.nbytes <= self.budget_bytes
            if has_room and not (waiter.is_video and self._are_enough_videos(waiter.nbytes)):
                return waiter
            if not waiter.is_video:
                return None
        return None

    def _are_enough_videos(self, nbytes: int) -> bool:
        if not self._num_videos:
            return False
        is_over = self._video_bytes + nbytes > SHARE_OF_VIDEOS * self.budget_bytes
        return is_over or self._num_videos >= self._max_videos

    def _count(self, turn: Turn, sign: int) -> None:
        self.num_running += sign
        self.in_flight_bytes += sign * turn.nbytes
        self._num_videos += sign * turn.is_video
        self._video_bytes += sign * turn.is_video * turn.nbytes
