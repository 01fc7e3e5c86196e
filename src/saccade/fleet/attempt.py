"""One attempt to serve a request at a worker or a pair, from the connector's call to the end of the answer."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from saccade.concurrency import end_all
from saccade.connectors.session import slots_of
from saccade.connectors.sink import SendPixels, Stream
from saccade.errors import RequestTimeout, WorkerFailed, WorkerUnavailable
from saccade.fleet.placement import Placement
from saccade.fleet.sender import Sender
from saccade.protocol.chat import ChatPrompt
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest, MediaPixels

OBJECT_BYTES = 4
"""Roughly how many bytes Python objects take for each byte of their encoding."""

MAX_WAITING_BYTES = 16 << 20
"""Of the deltas of one request that wait for their client. A worker cannot be told to wait, so more end the request."""

SURE_DELTAS = 8
"""Deltas of each sample that may wait even without memory: an output that is fast takes a moment, too."""

READ_TOO_SLOWLY = "The answer was read too slowly, and no memory was left for more of it. Read faster, or ask for less."

Resend = Callable[[Sequence[int]], Awaitable[tuple[MediaPixels, ...]]]
"""Returns pixels by media index, for a worker that no longer holds encoder outputs it was expected to hold."""


class Output(Protocol):
    """Takes the deltas of an answer."""

    @property
    def is_whole(self) -> bool:
        """Whether the answer needs no further delta."""

    def take(self, delta: TokenDelta) -> bool:
        """Take *delta*. Return whether the next one may follow at once."""

    async def flush(self) -> None:
        """Wait until the next delta may follow."""


class Attempt:
    """Sends *request* to the worker or the pair of *placement*, and is the sink of its stream.

    Its deltas go to *output*. While *output* takes no more, they wait, and *count* is called with their bytes: positive
    when they begin to wait, negative at the end. It returns whether there is memory for them. If too many wait without
    memory, the worker's work ends at once, and the request fails as soon as *output* takes more.

    *resend* prepares pixels that a worker asks for. *on_first_delta* is called before the first delta; until then
    another worker may be tried. A worker that takes chats gets what *chat* returns.
    """

    def __init__(
        self,
        sender: Sender,
        placement: Placement,
        request: EngineRequest,
        output: Output,
        count: Callable[[int], bool],
        resend: Resend,
        on_first_delta: Callable[[], object],
        chat: Callable[[], ChatPrompt],
    ) -> None:
        self.placement = placement
        self.has_begun = False
        self._sender = sender
        self._request = request
        self._chat = chat
        self._output = output
        self._count = count
        self._resend = resend
        self._on_first_delta = on_first_delta
        self._is_sent = False
        self._stream: Stream | None = None
        self._closing: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[TokenDelta | BaseException, int]] | None = None
        self._num_waiting_bytes = 0
        self._resends: list[asyncio.Task[None]] = []
        self._has_failed_to_resend = False
        self._error: BaseException | None = None
        self._has_ended = False
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Send the request, and return when its answer is complete. Cancelling this aborts the request.

        From the call on, the worker pool releases the request's slots, even if this raises. Raises WorkerUnavailable,
        WorkerFailed, and the errors of the engine, of *output* and of *resend*.
        """
        self._is_sent = True
        try:
            self._stream = await self._sender.send(self.placement, self._request, self, self._chat)
            await self._woken.wait()
            while not self._is_over():
                await self._output.flush()
                self._take_waiting()
                await self._woken.wait()
        except (WorkerFailed, WorkerUnavailable) as error:
            if not self.has_begun and not self._has_failed_to_resend:
                self._sender.failed(self.placement.failed_worker, error)
            raise
        finally:
            self._has_ended = True
            self._drop_waiting()
            stream, self._stream = self._stream, None
            closing, self._closing = self._closing, None
            try:
                await end_all(self._resends)
            finally:
                if closing is not None:
                    await closing
                if stream is not None:
                    await stream.close()

    def release_unsent(self) -> None:
        """Release the request's slots if run() was never called."""
        if not self._is_sent:
            self._sender.release(slots_of(self._request))

    def abort_sample(self, index: int) -> None:
        """Stop work on one sample; the others go on."""
        if self._stream is not None:
            self._stream.abort_sample(index)

    def delta(self, delta: TokenDelta) -> None:
        """Pass *delta* to the output, or queue it while the output takes no more."""
        if self._has_ended:
            return
        if self._waiting is not None:
            if self._closing is None:
                self._wait(self._waiting, delta)
            return
        if not self.has_begun:
            self.has_begun = True
            self._sender.begun(self.placement, self._request)
            self._on_first_delta()
        if not self._output.take(delta):
            self._waiting = deque()
            self._woken.set()
        if self._output.is_whole:
            self._has_ended = True
            self._woken.set()

    def pixels_wanted(self, media: Sequence[int], worker: str, send: SendPixels) -> None:
        """Start to prepare the pixels. If that fails, the request fails."""
        if self._has_ended:
            return
        self._sender.lacked_images(worker)
        task = asyncio.create_task(self._send_pixels(media, worker, send), name=f"pixels for {worker}")
        task.add_done_callback(self._sent_pixels)
        self._resends.append(task)

    def fail(self, error: BaseException) -> None:
        """End the request with *error* after the queued deltas."""
        if self._has_ended:
            return
        if self._waiting is not None:
            if self._closing is None:
                self._waiting.append((error, 0))
        else:
            self._error, self._has_ended = error, True
            self._woken.set()

    def _is_over(self) -> bool:
        """Return whether the answer is complete. Raises the error that ended it."""
        self._woken.clear()
        if self._error is None:
            return self._output.is_whole
        # Neither this object nor this frame may keep an error whose traceback has both.
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error

    def _wait(self, waiting: deque[tuple[TokenDelta | BaseException, int]], delta: TokenDelta) -> None:
        """Add *delta* to those that are *waiting*. If there are too many, drop them all and end the worker's work."""
        num_bytes = OBJECT_BYTES * len(msgspec.msgpack.encode(delta))
        waiting.append((delta, num_bytes))
        self._num_waiting_bytes += num_bytes
        is_sure = len(waiting) <= SURE_DELTAS * self._request.num_samples
        has_room = self._count(num_bytes) or is_sure
        if (has_room and self._num_waiting_bytes <= MAX_WAITING_BYTES) or self._stream is None:
            return
        stream, self._stream = self._stream, None
        self._closing = asyncio.create_task(stream.close(), name="end of an unread answer")
        self._drop_waiting()
        self._waiting = deque([(RequestTimeout(READ_TOO_SLOWLY), 0)])

    def _drop_waiting(self) -> None:
        """Drop the deltas that wait, and release their memory."""
        self._waiting = None
        self._release_waiting(self._num_waiting_bytes)

    def _release_waiting(self, num_bytes: int) -> None:
        self._num_waiting_bytes -= num_bytes
        self._count(-num_bytes)

    def _take_waiting(self) -> None:
        """Pass on what waits until the output takes no more; the rest stays as it is, however long it is."""
        waiting, self._waiting = self._waiting or deque(), None
        while waiting and self._waiting is None and not self._has_ended:
            one, num_bytes = waiting.popleft()
            self._release_waiting(num_bytes)
            if isinstance(one, TokenDelta):
                self.delta(one)
            else:
                self.fail(one)
        if self._waiting is not None:
            self._waiting = waiting

    async def _send_pixels(self, media: Sequence[int], worker: str, send: SendPixels) -> None:
        target = next(one for one in self.placement.workers if one.url == worker)
        send(await self._sender.reachable(target, await self._resend(media)))

    def _sent_pixels(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._has_failed_to_resend = True
            self.fail(error)
