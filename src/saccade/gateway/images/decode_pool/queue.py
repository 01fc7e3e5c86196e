"""Which job a decode process takes next."""

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from saccade import fair_queue
from saccade.errors import Draining, SaccadeError
from saccade.fair_queue import FairQueue
from saccade.gateway.images.decode_pool.server import DecodeProcess

SHARE_OF_VIDEOS = 0.5
"""The part of the budget of decoded bytes that several videos may take together."""

MAX_WAITING_VIDEOS = 64


@dataclass(frozen=True)
class Turn:
    """A job's *process*, and what else it has of the queue until leave(); *video* is its turn among videos."""

    process: DecodeProcess
    nbytes: int
    video: fair_queue.Turn | None = None


@dataclass(frozen=True)
class _Waiter:
    """A job without a process, and where its process is put."""

    nbytes: int
    process: asyncio.Future[DecodeProcess]


class DecodeQueue:
    """Assigns jobs, in order of arrival, to idle processes while the budget of decoded bytes has room.

    Before that, videos wait for one another, in turns of clients and each for *video_wait_seconds*: they may take half
    a minute, and only *max_videos* of the processes work on them. Images overtake those that wait so. *lost* is
    called with a process that died while it was idle.
    """

    def __init__(
        self, budget_bytes: int, max_videos: int, lost: Callable[[DecodeProcess], None], video_wait_seconds: float
    ) -> None:
        self.budget_bytes = budget_bytes
        self.in_flight_bytes = 0
        self.num_running = 0
        video_bytes = int(SHARE_OF_VIDEOS * budget_bytes)
        self._videos = FairQueue(video_bytes, "videos", max_waiting=MAX_WAITING_VIDEOS, wait_seconds=video_wait_seconds)
        # A small video counts as much as keeps their number within its bound.
        self._least_video_bytes = video_bytes // max_videos
        self._lost = lost
        self._is_closed = False
        self._idle: list[DecodeProcess] = []
        self._waiting: list[_Waiter] = []

    @property
    def num_waiting(self) -> int:
        """Jobs that have no process yet."""
        return self._videos.num_waiting + sum(not waiter.process.done() for waiter in self._waiting)

    async def enter(self, nbytes: int, *, is_video: bool = False, client: Hashable = None) -> Turn:
        """Wait for a process and for *nbytes* of the budget; a job over the whole budget runs alone.

        Raises QueueFull where too many videos wait, or one waits too long; Draining after close().
        """
        video = await self._videos.enter(client, max(nbytes, self._least_video_bytes)) if is_video else None
        try:
            process = await self._process(nbytes)
        except BaseException:
            if video is not None:
                video.leave()
            raise
        return Turn(process, nbytes, video)

    def leave(self, turn: Turn, process: DecodeProcess | None) -> None:
        """End a turn; *process* is None where the process has ended, and its replacement comes by add()."""
        self._leave(turn.nbytes, process)
        if turn.video is not None:
            turn.video.leave()

    def add(self, process: DecodeProcess | None) -> None:
        """Take in an idle process, and let the next jobs begin."""
        if process is not None:
            self._idle.append(process)
        self._advance()

    def refuse(self, error: SaccadeError) -> None:
        """Fail all waiting jobs with *error*."""
        self._videos.refuse(error)
        for waiter in self._waiting:
            if not waiter.process.done():
                waiter.process.set_exception(error)
        self._waiting.clear()

    def close(self) -> None:
        """Fail all waiting jobs, and all that come, with Draining."""
        self._is_closed = True
        self.refuse(draining())

    async def _process(self, nbytes: int) -> DecodeProcess:
        if self._is_closed:
            raise draining()
        waiter = _Waiter(nbytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._advance()
        try:
            return await waiter.process
        except asyncio.CancelledError:
            if waiter.process.done() and not waiter.process.cancelled() and waiter.process.exception() is None:
                self._leave(nbytes, waiter.process.result())
            raise

    def _leave(self, nbytes: int, process: DecodeProcess | None) -> None:
        self.num_running -= 1
        self.in_flight_bytes -= nbytes
        self.add(process)

    def _advance(self) -> None:
        self._waiting = [waiter for waiter in self._waiting if not waiter.process.done()]
        while self._idle and self._waiting and self._has_room(self._waiting[0].nbytes):
            process = self._idle.pop(0)
            if not process.alive:
                self._lost(process)
                continue
            waiter = self._waiting.pop(0)
            self.num_running += 1
            self.in_flight_bytes += waiter.nbytes
            waiter.process.set_result(process)

    def _has_room(self, nbytes: int) -> bool:
        return not self.in_flight_bytes or self.in_flight_bytes + nbytes <= self.budget_bytes


def draining() -> Draining:
    """Return the error of jobs that come when the server ends."""
    return Draining("The server is shutting down.")
