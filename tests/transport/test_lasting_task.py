"""A task whose error would be seen by nobody says it in the log, and begins again."""

import asyncio
import logging

import pytest

from saccade.transport import lasting_task


async def test_a_task_that_fails_is_logged_and_begins_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_task, "FIRST_PAUSE_SECONDS", 0.001)
    turns: list[int] = []

    async def work() -> None:
        turns.append(1)
        if len(turns) < 3:
            raise KeyError("layer_types")

    await lasting_task.begin(work, "worker client grpc://a:1")
    assert len(turns) == 3
    assert [record.levelno for record in caplog.records] == [logging.CRITICAL] * 2
    record = caplog.records[1]
    assert record.getMessage() == "worker client grpc://a:1 met an unforeseen error, and begins again in 0.002 s"
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


async def test_a_task_whose_end_fails_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise OSError("a connection that cannot be closed")

    task = lasting_task.begin(work, "worker client grpc://a:1")
    await asyncio.sleep(0)
    await lasting_task.end(task)
    assert [record.getMessage() for record in caplog.records] == [
        "worker client grpc://a:1 met an unforeseen error at its end"
    ]


async def test_a_task_that_is_cancelled_ends_quietly(caplog: pytest.LogCaptureFixture) -> None:
    task = lasting_task.begin(lambda: asyncio.sleep(60), "worker client grpc://a:1")
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not caplog.records
