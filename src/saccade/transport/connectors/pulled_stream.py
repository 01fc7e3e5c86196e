"""A stream over a library that is pulled: one task reads the answer, and pushes it to the sink."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from saccade.errors import WorkerFailed
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import MediaPixels
from saccade.transport import lasting_task
from saccade.transport.sink import Sink


class PulledStream:
    """Pushes what *deltas* yields to *sink*.

    *deltas* is called with the stream, whose pixels() it may await. *worker* is a url.
    """

    def __init__(
        self,
        worker: str,
        sink: Sink,
        deltas: Callable[["PulledStream"], AsyncGenerator[TokenDelta, None]],
    ) -> None:
        self._worker = worker
        self._sink = sink
        self._deltas = deltas
        self._task = asyncio.create_task(self._read(), name=f"answer of {worker}")

    async def pixels(self, media: Sequence[int]) -> tuple[MediaPixels, ...]:
        """Return the pixels of *media*, by index, as soon as the sink has sent them."""
        pixels = asyncio.get_running_loop().create_future()
        self._sink.pixels_wanted(media, self._worker, pixels.set_result)
        brought: tuple[MediaPixels, ...] = await pixels
        return brought

    def abort_sample(self, index: int) -> None:
        """Do nothing: these servers cannot stop one sample. It ends by itself, or with the whole request."""

    async def close(self) -> None:
        """Abort the request unless it has ended."""
        await lasting_task.end(self._task)

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(self._deltas(self)) as deltas:
                async for delta in deltas:
                    self._sink.delta(delta)
        except Exception as error:
            self._sink.fail(error)
        else:
            self._sink.fail(WorkerFailed("The worker ended the answer without saying why."))
