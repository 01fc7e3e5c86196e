"""Turns of decode processes: in order, within the budget, and never all of them for videos."""

import asyncio
from typing import Any

import pytest

from saccade.errors import InternalError
from saccade.gateway.pictures.decode_pool.queue import DecodeQueue, Turn

BUDGET = 100


class Process:
    """Stands for a decode process."""

    def __init__(self, alive: bool = True) -> None:
        self.alive = alive


class Line:
    """A queue over some processes, and the turns of jobs, by name."""

    def __init__(self, num_processes: int, max_videos: int) -> None:
        self.lost: list[Any] = []
        self.queue = DecodeQueue(BUDGET, max_videos, self.lost.append)
        for _ in range(num_processes):
            self.queue.add(Process())  # type: ignore[arg-type]
        self.jobs: dict[str, asyncio.Task[Turn]] = {}

    async def enter(self, name: str, nbytes: int = 1) -> None:
        is_video = name.startswith("video")
        self.jobs[name] = asyncio.create_task(self.queue.enter(nbytes, is_video=is_video))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        turn = self.jobs.pop(name).result()
        self.queue.leave(turn, turn.process)
        await asyncio.sleep(0)

    @property
    def begun(self) -> set[str]:
        return {name for name, job in self.jobs.items() if job.done()}

    async def end(self) -> None:
        for job in self.jobs.values():
            job.cancel()
        await asyncio.gather(*self.jobs.values(), return_exceptions=True)


async def test_pictures_overtake_videos_that_must_wait() -> None:
    line = Line(num_processes=2, max_videos=1)
    for name in ("video 1", "video 2", "video 3", "picture 1", "picture 2"):
        await line.enter(name)
    assert line.begun == {"video 1", "picture 1"}
    await line.leave("picture 1")
    assert line.begun == {"video 1", "picture 2"}
    await line.leave("video 1")
    assert line.begun == {"picture 2", "video 2"}
    assert line.queue.num_waiting == 1
    await line.end()


async def test_several_videos_take_half_of_the_budget() -> None:
    line = Line(num_processes=4, max_videos=3)
    await line.enter("video 1", BUDGET // 2)
    await line.enter("video 2", BUDGET // 4)
    await line.enter("picture 1", BUDGET // 2)
    assert line.begun == {"video 1", "picture 1"}
    await line.leave("video 1")
    assert line.begun == {"video 2", "picture 1"}
    await line.end()


async def test_a_job_over_the_budget_runs_alone_and_is_not_overtaken_by_pictures() -> None:
    line = Line(num_processes=2, max_videos=1)
    await line.enter("picture 1")
    await line.enter("picture 2", 2 * BUDGET)
    await line.enter("picture 3")
    assert line.begun == {"picture 1"}
    await line.leave("picture 1")
    assert line.begun == {"picture 2"}
    await line.leave("picture 2")
    assert line.begun == {"picture 3"}
    await line.leave("picture 3")
    await line.enter("video 1", 2 * BUDGET)
    assert line.begun == {"video 1"}
    await line.end()


async def test_who_leaves_the_line_holds_nothing() -> None:
    line = Line(num_processes=1, max_videos=1)
    await line.enter("video 1")
    await line.enter("video 2")
    line.jobs.pop("video 2").cancel()
    await line.enter("picture 1")
    await line.leave("video 1")
    assert line.begun == {"picture 1"}
    await line.leave("picture 1")
    assert (line.queue.num_running, line.queue.in_flight_bytes, line.queue.num_waiting) == (0, 0, 0)


async def test_dead_processes_are_reported_and_all_can_be_refused() -> None:
    line = Line(num_processes=0, max_videos=1)
    await line.enter("picture 1")
    dead = Process(alive=False)
    line.queue.add(dead)  # type: ignore[arg-type]
    assert (line.lost, line.begun) == ([dead], set())
    line.queue.refuse(InternalError("gone"))
    with pytest.raises(InternalError):
        await line.jobs["picture 1"]
