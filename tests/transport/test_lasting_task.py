"""A task whose error would be seen by nobody says it in the log."""

import asyncio
import logging

import pytest

from saccade.transport import lasting_task


async def _fail() -> None:
    raise KeyError("layer_types")


def test_error_is_logged_and_an_end_by_cancel_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        failing = lasting_task.begin(_fail(), "worker client grpc://a:1")
        lasting = lasting_task.begin(asyncio.sleep(60), "worker client grpc://b:1")
        await asyncio.wait([failing])
        lasting.cancel()
        await asyncio.wait([lasting])

    asyncio.run(run())
    (record,) = caplog.records
    assert record.levelno == logging.CRITICAL
    assert record.getMessage() == "worker client grpc://a:1 has ended by an unforeseen error"
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
