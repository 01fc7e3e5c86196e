"""What an error holds is let go of when it is answered."""

import asyncio

import pytest

from saccade.errors import InternalError
from saccade.gateway.server.errors import drop_tracebacks


async def test_an_error_that_another_request_is_handling_ends_only_here() -> None:
    """Requests that wait for the same work get the same error."""
    error = InternalError("The work failed.")
    may_end = asyncio.Event()

    async def fail() -> None:
        try:
            raise error
        finally:
            await may_end.wait()

    other = asyncio.create_task(fail())
    await asyncio.sleep(0)
    drop_tracebacks(error)
    may_end.set()
    with pytest.raises(InternalError, match="The work failed"):
        await asyncio.wait_for(other, 10)
