"""The order in which decode processes take jobs."""

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from saccade.errors import Draining, SaccadeError
from saccade.fair_queue import FairQueue
from saccade.gateway.images.decode_pool.server import DecodeProcess

SHARE_OF_VIDEOS = 0.5
"""The share of the budget of decoded bytes that several videos may take together."""

MAX_WAITING_VIDEOS = 64


@dataclass(frozen=True)
class Turn:
    """A job's *process*; *turns* are its turns in the queues that it has passed."""

    process: DecodeProcess
    turns: contextlib.ExitStack


class DecodeQueue:
    """Gives each job an idle process once the budget of decoded bytes has room for it, fairly between clients.

    Videos first wait for one another, up to *video_wait_seconds*: each may take half a minute, and only *max_videos*
    processes work on videos. Images overtake waiting videos. *lost* is called with a process that died while idle.
    """

    def __init__(
        self, budget_bytes: int, max_videos: int, lost: Callable[[DecodeProcess], None], video_wait_seconds: float
    ) -> None:
        video_bytes = int(SHARE_OF_VIDEOS * budget_bytes)
        self._videos = FairQueue(video_bytes, "videos", max_waiting=MAX_WAITING_VIDEOS, wait_seconds=video_wait_seconds)
        # A small video counts enough to keep the number of videos within its bound.
        self._least_video_bytes = video_bytes // max_videos
        self._processes = FairQueue(0, "images", max_waiting=None, wait_seconds=None)
        self._bytes = FairQueue(budget_bytes, "images", max_waiting=None, wait_seconds=None)
        self._lost = lost
        self._is_closed = False
        self._idle: list[DecodeProcess] = []

    @property
    def num_running(self) -> int:
        """Jobs that have a process."""
        return self._processes.weight - self._bytes.num_waiting

    @property
    def num_waiting(self) -> int:
        """Jobs that have no process yet."""
        return sum(queue.num_waiting for queue in (self._videos, self._processes, self._bytes))

    @property
    def in_flight_bytes(self) -> int:
        """Decoded bytes of the jobs that have a process."""
        return self._bytes.weight

    async def enter(self, nbytes: int, *, is_video: bool = False, client: Hashable = None) -> Turn:
        """Wait for a process and *nbytes* of the budget; a job over the whole budget runs alone.

        Raises QueueFull if too many videos wait, or one waits too long; Draining after close().
        """
        while True:
            with contextlib.ExitStack() as turns:
                if is_video:
                    await self._enter(self._videos, turns, client, max(nbytes, self._least_video_bytes))
                await self._enter(self._processes, turns, client, 1)
                await self._enter(self._bytes, turns, client, nbytes)
                process = self._idle.pop(0)
                if process.alive:
                    return Turn(process, turns.pop_all())
                self._processes.grow(-1)
                self._lost(process)

    def leave(self, turn: Turn, process: DecodeProcess | None) -> None:
        """End a turn; *process* is None if the process has ended, and add() will bring its replacement."""
        if process is None:
            self._processes.grow(-1)
        else:
            self._idle.append(process)
        turn.turns.close()

    def add(self, process: DecodeProcess) -> None:
        """Add an idle process, and start the next job."""
        self._idle.append(process)
        self._processes.grow(1)

    def refuse(self, error: SaccadeError) -> None:
        """Fail all waiting jobs with *error*."""
        for queue in (self._videos, self._processes, self._bytes):
            queue.refuse(error)

    def close(self) -> None:
        """Fail all waiting and future jobs with Draining."""
        self._is_closed = True
        self.refuse(draining())

    async def _enter(self, queue: FairQueue, turns: contextlib.ExitStack, client: Hashable, weight: int) -> None:
        if self._is_closed:
            raise draining()
        turns.enter_context(await queue.enter(client, weight))


def draining() -> Draining:
    """Return the error of jobs during a shutdown."""
    return Draining("The server is shutting down.")
