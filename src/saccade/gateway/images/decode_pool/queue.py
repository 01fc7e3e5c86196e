"""Decides the order in which decode processes take jobs."""

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from saccade.errors import DeadlineExceeded, Draining, SaccadeError
from saccade.fair_queue import FairQueue
from saccade.gateway.images.decode_pool.server import DecodeProcess

SHARE_OF_VIDEOS = 0.5
"""The share of the budget of decoded bytes that several videos may take together."""

MAX_WAITING_VIDEOS = 64


class FileTime:
    """How many *seconds* of *total_seconds* are left for one PDF, whose pages are separate jobs."""

    def __init__(self, total_seconds: float) -> None:
        self.total_seconds = self.seconds = total_seconds

    def error(self) -> DeadlineExceeded:
        """Return the error for a page when no time is left."""
        return DeadlineExceeded(
            f"Drawing the pages of the PDF takes longer than {self.total_seconds:g} seconds; send fewer at a time."
        )


@dataclass(frozen=True)
class ProcessTurn:
    """A job's *process*, its *turns* in the queues that it has passed, and the *file_time* that it uses up."""

    process: DecodeProcess
    turns: contextlib.ExitStack
    file_time: FileTime | None = None


class DecodeQueue:
    """Gives each job an idle process once the budget for decoded bytes has room for it. Clients take turns.

    Slow jobs (videos, PDFs, and images that turned out slow) may take half a minute. So at most *max_slow* processes
    work on them, and other images overtake waiting slow jobs. Videos wait for each other first, up to
    *video_wait_seconds*. The queue calls *lost* with each process that died while idle.
    """

    def __init__(
        self, budget_bytes: int, max_slow: int, lost: Callable[[DecodeProcess], None], video_wait_seconds: float
    ) -> None:
        video_bytes = int(SHARE_OF_VIDEOS * budget_bytes)
        self._videos = FairQueue(video_bytes, "videos", max_waiting=MAX_WAITING_VIDEOS, wait_seconds=video_wait_seconds)
        # A small video counts enough to keep the number of videos within its bound.
        self._least_video_bytes = video_bytes // max_slow
        self._slow = FairQueue(max_slow, "slow images", max_waiting=None, wait_seconds=None)
        self._processes = FairQueue(0, "images", max_waiting=None, wait_seconds=None)
        self._bytes = FairQueue(budget_bytes, "images", max_waiting=None, wait_seconds=None)
        self._lost = lost
        self._is_closed = False
        self._idle: list[DecodeProcess] = []

    @property
    def num_running(self) -> int:
        """How many jobs have a process."""
        return self._processes.weight - self._bytes.num_waiting

    @property
    def num_waiting(self) -> int:
        """How many jobs wait for a process."""
        return sum(queue.num_waiting for queue in self._queues)

    @property
    def in_flight_bytes(self) -> int:
        """Decoded size in bytes of the jobs that have a process."""
        return self._bytes.weight

    @property
    def _queues(self) -> tuple[FairQueue, ...]:
        """The queues, in the order in which a job passes them."""
        return self._videos, self._slow, self._processes, self._bytes

    def keeps_others_waiting(self, client: Hashable) -> bool:
        """Return whether jobs of clients other than *client* wait for a process."""
        return self._processes.has_waiting_besides(client)

    async def enter(
        self, nbytes: int, *, is_video: bool = False, is_slow: bool = False, client: Hashable = None
    ) -> ProcessTurn:
        """Wait for a process and *nbytes* of the budget; a job over the whole budget runs alone.

        Every video is slow. Raises QueueFull if too many videos wait or this one waits too long, and Draining after
        close().
        """
        while True:
            with contextlib.ExitStack() as turns:
                if is_video:
                    await self._enter(self._videos, turns, client, max(nbytes, self._least_video_bytes))
                if is_video or is_slow:
                    await self._enter(self._slow, turns, client, 1)
                await self._enter(self._processes, turns, client, 1)
                await self._enter(self._bytes, turns, client, nbytes)
                process = self._idle.pop(0)
                if process.alive:
                    return ProcessTurn(process, turns.pop_all())
                self._processes.grow(-1)
                self._lost(process)

    def leave(self, turn: ProcessTurn, process: DecodeProcess | None) -> None:
        """End a turn; *process* is None if the process has ended, and add_process() will bring its replacement."""
        if process is None:
            self._processes.grow(-1)
        else:
            self._idle.append(process)
        turn.turns.close()

    def add_process(self, process: DecodeProcess) -> None:
        """Add an idle process, and start the next job."""
        self._idle.append(process)
        self._processes.grow(1)

    def refuse(self, error: SaccadeError) -> None:
        """Fail all waiting jobs with *error*."""
        for queue in self._queues:
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
    """Return the error for jobs during a shutdown."""
    return Draining("The server is shutting down.")
