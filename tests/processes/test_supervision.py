"""Processes with small real programs: tied to their parent, ended within a limit, started again."""

import asyncio
import signal
import sys
import time

import pytest

from saccade.processes import supervision

SLEEP = "import time; time.sleep(600)"


async def started(program: str) -> asyncio.subprocess.Process:
    return await supervision.start_process([sys.executable, "-c", program], signal_at_parents_death=signal.SIGKILL)


async def test_process_that_ends_when_asked_is_not_killed() -> None:
    process = await started("import time; time.sleep(0.1); raise SystemExit(3)")
    await supervision.end_process(process, 60)
    assert process.returncode == 3
    supervision.send_signal(process, signal.SIGKILL)  # for one that has ended, no error


async def test_process_that_does_not_end_in_time_is_killed() -> None:
    process = await started(SLEEP)
    before = time.monotonic()
    await supervision.end_process(process, 0.2)
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - before < 30


async def test_cancelled_end_leaves_no_process() -> None:
    process = await started(SLEEP)
    ending = asyncio.create_task(supervision.end_process(process, 600))
    await asyncio.sleep(0.1)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("code", "words"), [(0, "ended with exit code 0"), (3, "ended with exit code 3"), (-9, "was ended by SIGKILL")]
)
def test_reason_of_the_end_is_worded(code: int, words: str) -> None:
    assert supervision.ending(code) == words


async def test_process_is_restarted_until_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    own_loop, original = asyncio.get_running_loop(), asyncio.sleep

    async def sleep(seconds: float) -> None:
        if asyncio.get_running_loop() is own_loop:
            waits.append(seconds)
        else:  # in a server that other tests share
            await original(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    sentences = iter(["The engine ended.", "The engine ended.", None])

    async def live() -> str | None:
        return next(sentences)

    await supervision.keep_running(live)
    assert waits == [0.5, 1.0]
    assert "The engine ended. It is started again in 1.0 s." in caplog.text
