"""The gateway's end of the native wire: one stream to one worker, many requests on it."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import msgspec

from saccade.errors import ImageTooLarge, InternalError, SaccadeError, WorkerFailed, WorkerUnavailable, from_code
from saccade.protocol.description import Description
from saccade.protocol.load import Load
from saccade.protocol.output import FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import Abort, EngineRequest
from saccade.transport.backoff import Backoff
from saccade.transport.proto.worker_pb2 import DescribeRequest, GatewayFrame
from saccade.transport.proto.worker_pb2_grpc import WorkerStub
from saccade.transport.wire import CLIENT_OPTIONS, MAX_COMMAND_BYTES, target

DESCRIBE_SECONDS = 10.0
LOST = "The worker stopped while it answered; the request can be sent again."

logger = logging.getLogger(__name__)


def _ignore(_: object) -> None:
    pass


class _Session:
    """One life of the stream: commands on their way out, requests that are open, slots that the worker may read."""

    def __init__(self, on_released: Callable[[Sequence[str]], None]) -> None:
        self._on_released = on_released
        self._outbound: asyncio.Queue[bytes] = asyncio.Queue()
        self._encoder = msgspec.msgpack.Encoder()
        self._open: dict[str, asyncio.Queue[TokenDelta | WorkerFailed]] = {}
        self._lent: Counter[str] = Counter()

    async def outbound(self) -> AsyncIterator[GatewayFrame]:
        """Yield the frames to send, for ever."""
        while True:
            yield GatewayFrame(payload=await self._outbound.get())

    def submit(self, request: EngineRequest) -> asyncio.Queue[TokenDelta | WorkerFailed]:
        """Send *request* and return where its deltas will arrive. Raises ImageTooLarge where it fits no message."""
        if request.request_id in self._open:
            self._on_released(slots_of(request))
            raise InternalError(f"The request id {request.request_id} is in use already.")
        command = self._encoder.encode(request)
        if len(command) > MAX_COMMAND_BYTES:
            # gRPC would end the stream over it, and with it everybody else's requests.
            self._on_released(slots_of(request))
            raise ImageTooLarge(
                f"The request's pictures come to {len(command)} bytes for the model; at most {MAX_COMMAND_BYTES} can "
                "be sent to this worker. Send fewer or smaller ones.",
                "messages",
            )
        deltas: asyncio.Queue[TokenDelta | WorkerFailed] = asyncio.Queue()
        self._open[request.request_id] = deltas
        self._lent.update(slots_of(request))
        self._outbound.put_nowait(command)
        return deltas

    def leave(self, request_id: str, *, finished: bool) -> None:
        """Forget a request, and abort it unless the worker has *finished* it."""
        if self._open.pop(request_id, None) is not None and not finished:
            self._outbound.put_nowait(self._encoder.encode(Abort(request_id=request_id)))

    def deliver(self, frame: StepFrame) -> None:
        """Hand every delta to its request; one for a request that has left is dropped."""
        for delta in frame.deltas:
            if (deltas := self._open.get(delta.request_id)) is not None:
                deltas.put_nowait(delta)
        released = [name for name in frame.released if self._returned(name)]
        if released:
            self._on_released(released)

    def fail(self, sentence: str) -> None:
        """Fail every open request, and take back every slot: nobody will read them."""
        for deltas in self._open.values():
            deltas.put_nowait(WorkerFailed(sentence))
        self._open.clear()
        if released := list(self._lent.elements()):
            self._lent.clear()
            self._on_released(released)

    def _returned(self, name: str) -> bool:
        """Note that one use of a slot is over; False where none was open, which a worker in order never says."""
        if self._lent[name] <= 0:
            return False
        self._lent[name] -= 1
        return True


def slots_of(request: EngineRequest) -> list[str]:
    """Return the names of the shared-memory slots that *request* refers to."""
    return [item.slot.name for item in request.media if item.slot is not None]


class WorkerClient:
    """A worker as a gateway sees it; it connects, and connects again, by itself between start() and close().

    *url* is `grpc://host:port` or `unix:/path`. Every slot of a request given to generate() comes back through
    *on_released*, by name, once for each picture that lies in it: when the worker has copied it, or never will.
    *on_change* is called with this client whenever `ready`, `description` or both have changed.
    """

    def __init__(
        self,
        url: str,
        on_released: Callable[[Sequence[str]], None] = _ignore,
        on_change: Callable[["WorkerClient"], None] = _ignore,
    ) -> None:
        self.url = url
        self.description: Description | None = None
        self.load: Load | None = None
        self._target = target(url)
        self._on_released = on_released
        self._on_change = on_change
        self._session: _Session | None = None
        self._task: asyncio.Task[None] | None = None
        self._frames = msgspec.msgpack.Decoder(StepFrame)
        self._descriptions = msgspec.msgpack.Decoder(Description)

    @property
    def ready(self) -> bool:
        """Whether a stream to a running engine is open."""
        return self._session is not None

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._task = asyncio.create_task(self._run(), name=f"worker client {self.url}")

    async def close(self) -> None:
        """End the stream; the worker aborts what is still open, and open requests raise WorkerFailed."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Send *request* and yield its deltas, the last with a finish reason.

        Closing the iterator early aborts the request at once. Raises WorkerUnavailable where no engine is ready,
        WorkerFailed when it dies, ImageTooLarge for more inline pixels than a message holds, and whatever error a
        delta carries.
        """
        session = self._session
        if session is None:
            self._on_released(slots_of(request))
            raise WorkerUnavailable("The worker is not ready; try again shortly.")
        deltas = session.submit(request)
        finished = False
        try:
            while not finished:
                delta = await deltas.get()
                finished = isinstance(delta, WorkerFailed) or delta.finish_reason is not None
                yield _checked(delta)
        finally:
            session.leave(request.request_id, finished=finished)

    async def _run(self) -> None:
        backoff = Backoff(first_seconds=0.05, limit_seconds=1.0, healthy_seconds=5.0)
        async with grpc.aio.insecure_channel(self._target, options=CLIENT_OPTIONS) as channel:
            stub = WorkerStub(channel)  # type: ignore[no-untyped-call]
            while True:
                backoff.started()
                reason = await self._live(stub)
                logger.debug("worker %s: %s", self.url, reason)
                await asyncio.sleep(backoff.after_failure())

    async def _live(self, stub: Any) -> str:
        """Describe, stream, relay until the stream ends; return why it ended."""
        session = _Session(self._on_released)
        call = None
        try:
            reply = await stub.Describe(DescribeRequest(), timeout=DESCRIBE_SECONDS)
            description = self._descriptions.decode(reply.description)
            call = stub.Stream(session.outbound())
            await call.wait_for_connection()
            self._enter(session, description)
            async for frame in call:
                self._take(session, self._frames.decode(frame.payload))
            return "the worker ended the stream"
        except grpc.aio.AioRpcError as error:
            return str(error.details())
        except msgspec.DecodeError as error:
            logger.error("worker %s sent a frame that is not of this version of the wire: %s", self.url, error)
            return "malformed frame"
        finally:
            self._leave(session)
            if call is not None:
                call.cancel()

    def _take(self, session: _Session, frame: StepFrame) -> None:
        if frame.load is not None:
            self.load = frame.load
        session.deliver(frame)

    def _enter(self, session: _Session, description: Description) -> None:
        self.description = description
        self._session = session
        self._on_change(self)

    def _leave(self, session: _Session) -> None:
        if self._session is session:
            self._session = None
            self.load = None
            session.fail(LOST)
            self._on_change(self)


def _checked(delta: TokenDelta | WorkerFailed) -> TokenDelta:
    """Return *delta*, or raise the error that it is or carries."""
    if isinstance(delta, SaccadeError):
        raise delta
    if delta.failure is not None:
        raise from_code(delta.failure.code, delta.failure.message, delta.failure.param)
    if delta.finish_reason is FinishReason.ERROR:
        raise InternalError("The engine could not finish this request.")
    return delta
