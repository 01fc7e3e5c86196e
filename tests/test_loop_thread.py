"""An event loop in a thread of its own ends with all that runs in it."""

import asyncio
import gc
import os
import signal
import threading
import weakref

import pytest
from waiting import wait_until

from saccade.loop_thread import LoopThread


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


async def wait_for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended.append("waiting")


async def begin(ended: list[str]) -> list[asyncio.Task[None]]:
    """Start a task that does not end by itself."""
    return [asyncio.ensure_future(wait_for_ever(ended))]


def test_interrupt_cancels_the_work_and_the_loop_goes_on() -> None:
    async def interrupting(ended: list[str]) -> None:
        await asyncio.sleep(0.5)  # until the caller waits: before, there would be nothing to cancel
        os.kill(os.getpid(), signal.SIGINT)  # to the process, as from a terminal
        await wait_for_ever(ended)

    loop, ended = LoopThread("test-loop"), list[str]()
    with pytest.raises(KeyboardInterrupt):
        loop.run(interrupting(ended))
    assert wait_until(lambda: ended == ["waiting"])
    assert loop.run(asyncio.sleep(0, "next")) == "next"
    loop.close()
    assert "test-loop" not in names()


def test_close_ends_tasks_that_are_left() -> None:
    loop, ended = LoopThread("test-loop"), list[str]()
    tasks = loop.run(begin(ended))
    loop.close()
    loop.close()
    assert ended == ["waiting"]
    assert [task.cancelled() for task in tasks] == [True]


def test_collected_loop_ends_its_thread() -> None:
    loop = LoopThread("test-loop")
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    assert "test-loop" not in names()
