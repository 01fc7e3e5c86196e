"""What workers answer, as iterators, for tests that read an answer step by step."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from saccade.concurrency import end_all
from saccade.connectors.sink import SendPixels, Sink
from saccade.errors import WorkerFailed, WorkerUnavailable
from saccade.fleet.attempt import Attempt
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.placement import Placement
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels

Supply = Callable[[Sequence[int]], Awaitable[tuple[MediaPixels, ...]]]


async def no_pixels(_: Sequence[int]) -> tuple[MediaPixels, ...]:
    """Fail."""
    raise WorkerUnavailable("The test has no pixels.")


def no_chat() -> ChatPrompt:
    """Fail."""
    raise WorkerUnavailable("The test has no chat.")


class QueueSink:
    """Keeps what arrives; *supply* brings pixels."""

    def __init__(self, supply: Supply) -> None:
        self.arrived: asyncio.Queue[TokenDelta | BaseException] = asyncio.Queue()
        self.delta = self.fail = self.arrived.put_nowait
        self._supply = supply
        self._tasks: list[asyncio.Task[None]] = []

    def pixels_wanted(self, media: Sequence[int], worker: str, send: SendPixels) -> None:
        """Bring the pixels, or fail."""

        async def bring() -> None:
            try:
                send(await self._supply(media))
            except Exception as error:
                self.fail(error)

        self._tasks.append(asyncio.create_task(bring()))

    async def close(self) -> None:
        """Wait for what brings pixels."""
        await asyncio.gather(*self._tasks)


async def generate(
    worker: Any, request: EngineRequest, supply: Supply = no_pixels, chat: Callable[[], ChatPrompt] = no_chat
) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of *worker*; closing the iterator closes the stream."""
    sink = QueueSink(supply)
    stream = worker.generate(request, sink, chat)
    num_open = request.num_samples
    try:
        while num_open:
            arrived = await sink.arrived.get()
            if isinstance(arrived, BaseException):
                raise arrived
            num_open -= arrived.finish_reason is not None
            yield arrived
    finally:
        await stream.close()
        await sink.close()


class QueueOutput:
    """Keeps deltas, and is whole when *num_samples* have ended."""

    def __init__(self, num_samples: int) -> None:
        self.arrived: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        self._num_open = num_samples

    @property
    def is_whole(self) -> bool:
        """Whether all samples have ended."""
        return not self._num_open

    def take(self, delta: TokenDelta) -> bool:
        """Keep *delta*."""
        self._num_open -= delta.finish_reason is not None
        self.arrived.put_nowait(delta)
        return True

    async def flush(self) -> None:
        """Return at once."""


async def stream(
    dispatcher: Dispatcher,
    placement: Placement,
    request: EngineRequest,
    supply: Supply = no_pixels,
    chat: Callable[[], ChatPrompt] = no_chat,
) -> AsyncGenerator[TokenDelta, None]:
    """Yield the deltas of an attempt; closing the iterator ends it."""
    output = QueueOutput(request.num_samples)
    attempt = Attempt(dispatcher.sender, placement, request, output, bool, supply, lambda: None, chat)
    running = asyncio.create_task(attempt.run())
    running.add_done_callback(lambda _: output.arrived.put_nowait(None))
    try:
        while (delta := await output.arrived.get()) is not None:
            yield delta
        await running
    finally:
        running.cancel()
        with suppress(BaseException):
            await running


class ScriptedStream:
    """A stream that plays *deltas*; *on_abort* is called with the index of a sample that is stopped."""

    def __init__(
        self, deltas: AsyncGenerator[TokenDelta, None], sink: Sink, on_abort: Callable[[int], object] = lambda _: None
    ) -> None:
        self.abort_sample = on_abort
        self._deltas = deltas
        self._sink = sink
        self._tasks = [asyncio.create_task(self._play())]

    async def close(self) -> None:
        """End the script. The task has the error of its end, which has this object."""
        await end_all(self._tasks)
        await self._deltas.aclose()

    async def _play(self) -> None:
        try:
            async for delta in self._deltas:
                self._sink.delta(delta)
        except Exception as error:
            self._sink.fail(error)
        else:
            self._sink.fail(WorkerFailed("The worker ended the answer without saying why."))
