"""Turns of decode processes: in order, within the budget, never all for slow jobs, and those in turns of clients."""

import asyncio
from typing import Any

import pytest

from saccade.errors import Draining, InternalError, QueueFull
from saccade.gateway.images.decode_pool.queue import MAX_WAITING_VIDEOS, DecodeQueue, ProcessTurn

BUDGET = 100


class Process:
    """Stands for a decode process."""

    def __init__(self, alive: bool = True) -> None:
        self.alive = alive


class Line:
    """A queue over some processes, and the turns of jobs, by name; a video's client is what its name ends with."""

    def __init__(self, num_processes: int, max_videos: int, video_wait_seconds: float = 60.0) -> None:
        self.lost: list[Any] = []
        self.queue = DecodeQueue(BUDGET, max_videos, self.lost.append, video_wait_seconds)
        for _ in range(num_processes):
            self.queue.add_process(Process())  # type: ignore[arg-type]
        self.jobs: dict[str, asyncio.Task[ProcessTurn]] = {}

    async def enter(self, name: str, nbytes: int = 1) -> None:
        kind, client = name.split()[0], name.partition(" of ")[2]
        entering = self.queue.enter(nbytes, is_video=kind == "video", is_slow=kind == "pdf", client=client)
        self.jobs[name] = asyncio.create_task(entering)
        await settle()

    async def leave(self, name: str) -> None:
        turn = self.jobs.pop(name).result()
        self.queue.leave(turn, turn.process)
        await settle()

    @property
    def begun(self) -> set[str]:
        return {name for name, job in self.jobs.items() if job.done()}

    async def end(self) -> None:
        for job in self.jobs.values():
            job.cancel()
        await asyncio.gather(*self.jobs.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_images_overtake_videos_that_must_wait() -> None:
    line = Line(num_processes=2, max_videos=1)
    for name in ("video 1", "video 2", "video 3", "image 1", "image 2"):
        await line.enter(name)
    assert line.begun == {"video 1", "image 1"}
    await line.leave("image 1")
    assert line.begun == {"video 1", "image 2"}
    await line.leave("video 1")
    assert line.begun == {"image 2", "video 2"}
    assert line.queue.num_waiting == 1
    await line.end()


@pytest.mark.parametrize("kinds", [("pdf", "pdf", "pdf"), ("video", "pdf", "pdf"), ("pdf", "video", "video")])
async def test_slow_jobs_of_every_kind_leave_a_process_to_images(kinds: tuple[str, ...]) -> None:
    line = Line(num_processes=3, max_videos=2)
    names = [f"{kind} {number} of {client}" for number, kind in enumerate(kinds) for client in ("evil", "worse")]
    for name in (*names, "image 1 of lab", "image 2 of evil"):
        await line.enter(name)
    assert line.begun == {*names[:2], "image 1 of lab"}
    await line.leave("image 1 of lab")
    assert line.begun == {*names[:2], "image 2 of evil"}
    await line.leave(names[0])
    assert len(line.begun) == 3
    assert line.queue.num_waiting == 3
    await line.end()


async def test_several_videos_take_half_of_the_budget() -> None:
    line = Line(num_processes=4, max_videos=3)
    await line.enter("video 1", BUDGET // 2)
    await line.enter("video 2", BUDGET // 4)
    await line.enter("image 1", BUDGET // 2)
    assert line.begun == {"video 1", "image 1"}
    await line.leave("video 1")
    assert line.begun == {"video 2", "image 1"}
    await line.end()


async def test_a_job_over_the_budget_runs_alone_and_is_not_overtaken_by_images() -> None:
    line = Line(num_processes=2, max_videos=1)
    await line.enter("image 1")
    await line.enter("image 2", 2 * BUDGET)
    await line.enter("image 3")
    assert line.begun == {"image 1"}
    await line.leave("image 1")
    assert line.begun == {"image 2"}
    await line.leave("image 2")
    assert line.begun == {"image 3"}
    await line.leave("image 3")
    await line.enter("video 1", 2 * BUDGET)
    assert line.begun == {"video 1"}
    await line.end()


async def test_cancelled_job_holds_nothing() -> None:
    line = Line(num_processes=1, max_videos=1)
    await line.enter("video 1")
    await line.enter("video 2")
    line.jobs.pop("video 2").cancel()
    await line.enter("image 1")
    await line.leave("video 1")
    assert line.begun == {"image 1"}
    await line.leave("image 1")
    assert (line.queue.num_running, line.queue.in_flight_bytes, line.queue.num_waiting) == (0, 0, 0)


async def test_dead_processes_are_reported_and_all_can_be_refused() -> None:
    line = Line(num_processes=0, max_videos=1)
    await line.enter("image 1")
    dead = Process(alive=False)
    line.queue.add_process(dead)  # type: ignore[arg-type]
    await settle()
    assert (line.lost, line.begun) == ([dead], set())
    line.queue.refuse(InternalError("gone"))
    with pytest.raises(InternalError):
        await line.jobs["image 1"]


@pytest.mark.parametrize(("kind", "num_processes"), [("image", 1), ("video", 2)])
async def test_jobs_go_in_turns_of_clients(kind: str, num_processes: int) -> None:
    line = Line(num_processes, max_videos=1)
    for number in range(40):
        await line.enter(f"{kind} {number} of evil")
    await line.enter(f"{kind} of lab")
    await line.leave(f"{kind} 0 of evil")
    assert line.begun == {f"{kind} of lab"}
    await line.end()


async def test_videos_that_wait_are_bounded() -> None:
    line = Line(num_processes=2, max_videos=1)
    for number in range(1 + MAX_WAITING_VIDEOS):
        await line.enter(f"video {number} of evil")
    assert line.queue.num_waiting == MAX_WAITING_VIDEOS * 3 // 4
    with pytest.raises(QueueFull, match=r"share of the videos that wait is used up.*send the next ones when"):
        await line.jobs[f"video {MAX_WAITING_VIDEOS} of evil"]
    await line.end()


async def test_a_video_does_not_wait_for_ever() -> None:
    line = Line(num_processes=2, max_videos=1, video_wait_seconds=0.01)
    await line.enter("video 1")
    await line.enter("video 2")
    with pytest.raises(QueueFull, match=r"Other videos kept this one waiting .* try again later, or send fewer"):
        await line.jobs["video 2"]
    assert line.begun == {"video 1", "video 2"}
    assert line.queue.num_running == 1
    del line.jobs["video 2"]
    await line.leave("video 1")
    assert line.queue.num_running == 0


async def test_nothing_waits_after_the_end() -> None:
    line = Line(num_processes=2, max_videos=1)
    for name in ("video 1", "video 2", "image 1", "image 2"):
        await line.enter(name)
    # The turn of the second one is granted, and it has not run yet.
    turn = line.jobs.pop("video 1").result()
    line.queue.leave(turn, None)
    line.queue.close()
    for name in ("video 3", "image 3"):
        await line.enter(name)
    for name in ("video 2", "image 2", "video 3", "image 3"):
        with pytest.raises(Draining):
            await line.jobs[name]
