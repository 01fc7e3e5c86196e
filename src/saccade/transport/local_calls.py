"""Calls between one user's processes on one host: a request and its answer over a private Unix socket.

A frame's payload is the call's number (u32, little-endian), then the request or the answer. A request is answered
within the read that completes it, so no call waits for a later one.
"""

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path

from saccade.transport import lasting_task, private_sockets
from saccade.transport.backoff import Backoff
from saccade.transport.framing import UNREADABLE, Frames

MAX_BYTES = 64 << 20
NUMBER_BYTES = 4
FIRST_RETRY_SECONDS = 0.05
LAST_RETRY_SECONDS = 1.0

BEAT = b""
"""A request that every server answers with the same, from its event loop: whoever asks learns that the loop turns."""

Handler = Callable[[bytes], bytes]
"""Answers one encoded request; it neither blocks nor awaits. It may raise UNREADABLE."""

logger = logging.getLogger(__name__)


class NotReached(Exception):
    """The other process is not there, has ended the stream, or did not answer in time."""


class _Answering(Frames):
    """The server's end of one caller's stream."""

    def __init__(self, answer: Handler, opened: set["_Answering"]) -> None:
        super().__init__(self._take, lambda: MAX_BYTES)
        self._answer = answer
        self._opened = opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a stream from this process's own user; close any other unread."""
        super().connection_made(transport)
        self._opened.add(self)
        if private_sockets.peer_uid(transport.get_extra_info("socket")) != os.geteuid():
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._opened.discard(self)

    def _take(self, payload: bytes) -> None:
        if len(payload) == NUMBER_BYTES:
            self.send(payload + BEAT)
            return
        try:
            self.send(payload[:NUMBER_BYTES] + self._answer(payload[NUMBER_BYTES:]))
        except UNREADABLE:
            logger.warning("a call that cannot be decoded ended its stream")
            self.abort()


class CallServer:
    """Answers calls at the Unix socket *path*, in a folder that only this user may enter."""

    def __init__(self, path: Path, answer: Handler) -> None:
        self._path = path
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._opened: set[_Answering] = set()

    async def start(self) -> None:
        """Listen; replace a socket that another process left behind. Raises OSError."""
        self._path.unlink(missing_ok=True)
        listener = private_sockets.bound(self._path, ())
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Answering(self._answer, self._opened), sock=listener)

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for stream in tuple(self._opened):
            stream.close()


class CallClient:
    """Calls the process at the Unix socket *path*. Between start() and close() it reconnects when necessary."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count()
        self._frames: Frames | None = None
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect, and return at once."""
        self._task = lasting_task.begin(self._keep_connected, f"calls to {self._path.name}")

    async def close(self) -> None:
        """End the stream; waiting calls raise NotReached."""
        await lasting_task.end(self._task)

    async def call(self, request: bytes, seconds: float) -> bytes:
        """Return the answer to *request*. Raises NotReached if there is none within *seconds*."""
        if self._frames is None:
            raise NotReached
        number = (next(self._numbers) % (1 << 8 * NUMBER_BYTES)).to_bytes(NUMBER_BYTES, "little")
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._frames.send(number + request)
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except TimeoutError as error:
            raise NotReached from error
        finally:
            del self._waiting[number]

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, healthy_seconds=LAST_RETRY_SECONDS)
        while True:
            backoff.started()
            frames = Frames(self._take, lambda: MAX_BYTES)
            try:
                await loop.create_unix_connection(lambda frames=frames: frames, str(self._path))  # type: ignore[misc]
                self._frames = frames
                with contextlib.suppress(*UNREADABLE):
                    await frames.ended()
            except OSError:
                pass
            finally:
                self._lose(frames)
            await asyncio.sleep(backoff.after_failure())

    def _lose(self, frames: Frames) -> None:
        frames.abort()
        self._frames = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(NotReached())

    def _take(self, payload: bytes) -> None:
        waiting = self._waiting.get(payload[:NUMBER_BYTES])
        if waiting is not None and not waiting.done():
            waiting.set_result(payload[NUMBER_BYTES:])
