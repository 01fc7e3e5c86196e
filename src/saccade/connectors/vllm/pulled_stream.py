"""A stream for a library whose answers are pulled: a task reads the answer, and pushes it to the sink."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from saccade.connectors.sink import Sink
from saccade.errors import WorkerFailed
from saccade.protocol.request import MediaPixels
from saccade.transport import lasting_task


class PulledStream:
    """Runs *read*, which pushes the answer to *sink*, in a task; the sink fails if it raises, or returns too early.

    *read* is called with the stream, whose pixels() it may await. *worker* is a url.
    """

    def __init__(self, worker: str, sink: Sink, read: Callable[["PulledStream"], Awaitable[None]]) -> None:
        self._worker = worker
        self._sink = sink
        self._task = asyncio.create_task(self._run(read), name=f"answer of {worker}")

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

    async def _run(self, read: Callable[["PulledStream"], Awaitable[None]]) -> None:
        try:
            await read(self)
        except Exception as error:
            self._sink.fail(error)
        else:
            self._sink.fail(WorkerFailed("The worker ended the answer without saying why."))
