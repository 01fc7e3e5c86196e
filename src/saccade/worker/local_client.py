"""Sends requests to the engine from within the worker's process, for fronts that serve other wires."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

import grpc
import msgspec

from saccade.errors import SaccadeError, WorkerFailed, WorkerUnavailable, from_code
from saccade.protocol.description import Description
from saccade.protocol.engine_load import Load
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.output import StepFrame, TokenDelta
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand, ResetCaches
from saccade.transport import lasting_task
from saccade.transport.gateway_streams import Front, GatewayStream, Refused

Inbox = asyncio.Queue[TokenDelta | WorkerFailed]
"""The engine's output for one request."""


class LocalClient:
    """Sends requests to *front* over one connection.

    The first use opens the connection, as does the first use after an engine has ended. *described* returns the
    engine's description; it raises Refused while no engine is ready. Requests carry their pixels inline.
    """

    def __init__(self, front: Front, described: Callable[[], Description]) -> None:
        self.load = Load()
        self._front = front
        self._described = described
        self._connection: GatewayStream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._open: dict[str, Inbox] = {}
        self._numbers = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = msgspec.msgpack.Decoder(StepFrame)
        self._events = msgspec.msgpack.Decoder(KvEvents)

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self._open)

    def description(self) -> Description:
        """Return the engine's description. Raises WorkerUnavailable while no engine is ready."""
        try:
            return self._described()
        except Refused as refused:
            raise WorkerUnavailable(refused.sentence) from refused

    def new_id(self) -> str:
        """Return a request id that is unique in this client."""
        return str(next(self._numbers))

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Submit *request* and yield the deltas of its samples. Each sample's last delta has a finish reason.

        Closing the iterator early aborts the request. Raises WorkerUnavailable while no engine is ready, WorkerFailed
        if the engine ends or this process cannot keep up, and the error that a delta carries.
        """
        connection = self.connect()
        inbox: Inbox = asyncio.Queue()
        self._open[request.request_id] = inbox
        num_open = request.num_samples
        try:
            self._send(connection, request)
            while num_open:
                message = await inbox.get()
                num_open -= isinstance(message, TokenDelta) and message.finish_reason is not None
                if not isinstance(message, TokenDelta) or message.failure is not None:
                    num_open = 0
                    raise _error(message)
                yield message
        finally:
            del self._open[request.request_id]
            if num_open and connection is self._connection:
                self._send(connection, Abort(request_id=request.request_id))

    def abort(self, request_id: str) -> None:
        """Stop work on an open request: each of its samples ends as aborted."""
        if self._connection is not None and request_id in self._open:
            self._send(self._connection, Abort(request_id=request_id))

    def abort_sample(self, request_id: str, index: int) -> None:
        """Stop work on one sample of an open request; the others go on."""
        if self._connection is not None and request_id in self._open:
            self._send(self._connection, Abort(request_id=request_id, index=index))

    def reset_caches(self) -> None:
        """Make the engine drop caches that no request uses. Raises WorkerUnavailable while no engine is ready."""
        self._send(self.connect(), ResetCaches(prefix=True, media=True))

    async def block_events(self) -> AsyncGenerator[KvEvents, None]:
        """Yield what the engine's KV cache holds: first the messages of a snapshot, then every change.

        Raises WorkerUnavailable while no engine is ready, and WorkerFailed if the engine ends or the caller reads too
        slowly.
        """
        try:
            watcher = self._front.watch(True, False)
        except Refused as refused:
            raise WorkerUnavailable(refused.sentence) from refused
        try:
            while (payload := await watcher.next()) is not None:
                yield self._events.decode(payload)
        except Refused as refused:
            raise WorkerFailed(refused.sentence) from refused
        finally:
            self._front.hang_up(watcher)

    async def close(self) -> None:
        """End the connection; open requests raise WorkerFailed."""
        await lasting_task.end(self._reader)

    def connect(self) -> GatewayStream:
        """Return the connection, which also carries load reports. Raises WorkerUnavailable while no engine is ready."""
        if self._connection is None:
            try:
                self._connection = self._front.open()
            except Refused as refused:
                raise WorkerUnavailable(refused.sentence) from refused
            self._reader = asyncio.create_task(self._read(self._connection), name="local client")
        return self._connection

    def _send(self, connection: GatewayStream, command: GatewayCommand) -> None:
        self._front.receive(connection, self._encoder.encode(command))

    async def _read(self, connection: GatewayStream) -> None:
        """Hand every delta to its request until the connection ends; then fail the open requests."""
        sentence = "The engine ended; the request can be sent again."
        try:
            while (payload := await connection.next()) is not None:
                frame = self._frames.decode(payload)
                self.load = frame.load or self.load
                for delta in frame.deltas:
                    if (inbox := self._open.get(delta.request_id)) is not None:
                        inbox.put_nowait(delta)
        except Refused as refused:
            sentence = (
                "The worker is too busy." if refused.status is grpc.StatusCode.RESOURCE_EXHAUSTED else refused.sentence
            )
        finally:
            self._connection, self.load = None, Load()
            for inbox in self._open.values():
                inbox.put_nowait(WorkerFailed(sentence))
            self._front.hang_up(connection)


def _error(message: TokenDelta | WorkerFailed) -> SaccadeError:
    if isinstance(message, SaccadeError):
        return message
    if message.failure is not None:
        return from_code(message.failure.code, message.failure.message, message.failure.param)
    return WorkerFailed("The engine gave this request up.")
