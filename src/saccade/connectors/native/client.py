"""The gateway's end of the native wire: one stream to one worker carries many requests.

The stream goes over gRPC or, on the same host, over a Unix socket next to gRPC's, with the same frames. Neither uses
gRPC's asyncio, which passes every message through threads of its own, and waking each of them costs time
(docs/decisions/010-unix-stream.md, 039-grpc-over-h2.md).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError

from saccade.connectors.answer_bounds import AnswerBounds
from saccade.connectors.context import ClientContext
from saccade.connectors.native import feed
from saccade.connectors.native.descriptions import description_of
from saccade.connectors.native.step_frames import DELTA_BYTES, Excess, StepFrames, logprob_bytes
from saccade.connectors.session import LOST, NOT_READY, Connector, slots_of
from saccade.connectors.sink import Sink, Stream
from saccade.errors import (
    ImageTooLarge,
    InternalError,
    WorkerFailed,
    WorkerUnavailable,
    from_code,
)
from saccade.protocol.description import Description
from saccade.protocol.exactness import EXACT, Exactness
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.output import FinishReason, PixelsWanted, StepFrame, TokenDelta
from saccade.protocol.request import Abort, EngineRequest, MediaPixels, ResetCaches, SupplyPixels
from saccade.transport import lasting_task
from saccade.transport.allowance import Allowance
from saccade.transport.arrivals import Arrivals
from saccade.transport.credentials import WorkerCredentials
from saccade.transport.framing import UNREADABLE as NOT_MSGPACK
from saccade.transport.framing import ChannelClosed, Frames
from saccade.transport.proto.worker_pb2 import DescribeRequest, GatewayFrame, WorkerFrame
from saccade.transport.wire import MAX_COMMAND_BYTES, SERVICE_NAME, TAKEN, stream_path, target

UNREADABLE = (DecodeError, *NOT_MSGPACK)
DESCRIBE_SECONDS = 10.0
ENDED = "the worker ended the stream"
SILENT_SECONDS = 120.0
"""After this time without a frame a worker on this host counts as lost, such as one that was paused.

A worker sends its load four times a second, except during a step. It replaces an engine that takes 30 s for one.
"""

logger = logging.getLogger(__name__)


class _SentRequest:
    """A request that the worker has. Its answer goes to *sink*, and is limited, since workers may be faulty."""

    def __init__(self, session: "_NativeSession", request: EngineRequest, sink: Sink) -> None:
        self._session = session
        self._request_id = request.request_id
        self._sink = sink
        self._bounds = AnswerBounds(request)
        self._num_open = request.num_samples
        self.request = request
        self.max_delta_bytes = DELTA_BYTES + logprob_bytes(request)
        self.fail = sink.fail

    @property
    def num_left(self) -> int:
        """The most deltas that may still be on the way."""
        return self._bounds.num_left if self._num_open else 0

    def take(self, message: TokenDelta | PixelsWanted) -> None:
        """Hand *message* to the sink. Raises WorkerFailed if the worker sends more than the request asked for."""
        self._bounds.check(message)
        if isinstance(message, PixelsWanted):
            self._sink.pixels_wanted(message.media, self._session.url, self._send_pixels)
            return
        if message.failure is not None:
            self._num_open = 0
        elif message.finish_reason is not None:
            self._num_open -= 1
        if not self._num_open:
            self._session.leave(self._request_id, finished=True)
        if message.failure is not None:
            raise from_code(message.failure.code, message.failure.message, message.failure.param)
        if message.finish_reason is FinishReason.ERROR:
            raise InternalError("The engine could not finish this request.")
        self._sink.delta(message)

    def abort_sample(self, index: int) -> None:
        """Tell the worker to stop one sample."""
        self._session.abort_sample(self._request_id, index)

    async def close(self) -> None:
        """Abort the request unless it has ended."""
        self._session.leave(self._request_id, finished=not self._num_open)

    def _send_pixels(self, media: tuple[MediaPixels, ...]) -> None:
        self._session.send_pixels(SupplyPixels(request_id=self._request_id, media=media))


class _NativeSession:
    """One stream to the worker at *url*, with its open requests and the slots that the worker may read.

    Commands go to *write*, which is set before the stream opens.
    """

    write: Callable[[bytes], None]

    def __init__(self, url: str, on_released: Callable[[Sequence[str]], None]) -> None:
        self.url = url
        self._on_released = on_released
        self._encoder = msgspec.msgpack.Encoder()
        self._open: dict[str, _SentRequest] = {}
        self._arrivals = Arrivals(self._take)
        self._loans: Counter[str] = Counter()
        self._without_content = Allowance(65_536, 64)
        self.frames = StepFrames(self._max_delta_bytes)

    def submit(self, request: EngineRequest, sink: Sink) -> Stream:
        """Send *request*, whose deltas go to *sink*. Raises ImageTooLarge if it does not fit a message."""
        if request.request_id in self._open:
            self._on_released(slots_of(request))
            raise InternalError(f"The request id {request.request_id} is in use already.")
        self._send(request, slots_of(request))
        stream = self._open[request.request_id] = _SentRequest(self, request, sink)
        self.frames.enter(request)
        return stream

    def send_pixels(self, pixels: SupplyPixels) -> None:
        """Send pixels that the worker asked for, unless their request has left. Raises ImageTooLarge."""
        slots = [one.slot.name for one in pixels.media if one.slot is not None]
        if pixels.request_id in self._open:
            self._send(pixels, slots)
        else:
            self._on_released(slots)

    def _send(self, command: EngineRequest | SupplyPixels, slots: Sequence[str]) -> None:
        """Send a command that lends *slots*. If it does not fit a message, give them back and raise ImageTooLarge."""
        encoded = self._encoder.encode(command)
        if len(encoded) > MAX_COMMAND_BYTES:
            # gRPC would end the stream over it, and with it all other requests.
            self._on_released(slots)
            raise ImageTooLarge(
                f"The request's images come to {len(encoded)} bytes for the model; at most {MAX_COMMAND_BYTES} can "
                "be sent to this worker. Send fewer or smaller ones.",
                "messages",
            )
        self._loans.update(slots)
        self.frames.lend(len(slots))
        self.write(encoded)

    def abort_sample(self, request_id: str, index: int) -> None:
        """Tell the worker to stop one sample of an open request."""
        if request_id in self._open:
            self.write(self._encoder.encode(Abort(request_id=request_id, index=index)))

    def reset_caches(self, command: ResetCaches) -> None:
        """Send *command*: requests that are sent later find the caches empty."""
        self.write(self._encoder.encode(command))

    def leave(self, request_id: str, *, finished: bool) -> None:
        """Forget a request, and abort it unless the worker has *finished* it."""
        if (stream := self._open.pop(request_id, None)) is not None:
            self.frames.leave(stream.request, stream.num_left)
            if not finished:
                self.write(self._encoder.encode(Abort(request_id=request_id)))

    def deliver(self, frame: StepFrame) -> None:
        """Hand every delta and question to its request; drop those for a request that has left.

        Raises Excess if too many belong to no open request, or too many frames have no content. The limit is high: a
        worker sends its load four times a second, and a gateway that was paused for hours reads it all at once.
        """
        messages: list[TokenDelta | PixelsWanted] = [*frame.pixels_wanted, *frame.deltas]
        arrived = [one for one in messages if one.request_id in self._open]
        self._arrivals.add(arrived)
        released = [name for name in frame.released if self._returned(name)]
        if released:
            self.frames.take_back(len(released))
            self._on_released(released)
        if not messages and not frame.released and not self._without_content.spend():
            raise Excess("too many frames without content")
        if num_strays := len(messages) + len(frame.released) - len(arrived) - len(released):
            self.frames.spend(num_strays)

    def _max_delta_bytes(self, request_id: str) -> int:
        stream = self._open.get(request_id)
        return 0 if stream is None else stream.max_delta_bytes

    def _take(self, message: TokenDelta | PixelsWanted) -> None:
        if (stream := self._open.get(message.request_id)) is not None:
            try:
                stream.take(message)
            except Exception as error:
                # The error fails this request, not the stream that carries all.
                self.leave(message.request_id, finished=False)
                stream.fail(error)

    def fail(self, sentence: str) -> None:
        """Fail every open request, and take back every slot: the worker reads none of them any more."""
        self._arrivals.finish()
        failed = list(self._open.values())
        self._open.clear()
        for stream in failed:
            stream.fail(WorkerFailed(sentence))
        if released := list(self._loans.elements()):
            self._loans.clear()
            self._on_released(released)

    def _returned(self, name: str) -> bool:
        """Note that one use of a slot is over; return False if none was open, which only a faulty worker causes."""
        if self._loans[name] <= 0:
            return False
        self._loans[name] -= 1
        return True


class WorkerClient(Connector[_NativeSession]):
    """A gateway's connection to one of Saccade's workers.

    *url* is `grpc://host:port`, `grpcs://host:port` or `unix:/path`. If *context* knows model files that equal the
    worker's, the description has those. Every slot of a request passed to generate() is released.
    """

    REPORTS_IMAGES = True
    LOSS_LEVEL = logging.DEBUG  # errors of gRPC have a line of their own

    def __init__(self, url: str, context: ClientContext | None = None) -> None:
        target(url)
        super().__init__(url, context or ClientContext())
        self._logged: set[grpc.StatusCode] = set()
        self._stub: Any = None

    @property
    def exactness(self) -> Exactness:
        """EXACT: the worker reports every block by the key that a gateway computes."""
        return EXACT

    @property
    def ready(self) -> bool:
        """Whether to send it new requests: a stream is open to a running engine that is not draining."""
        return self._session is not None and not (self.load is not None and self.load.draining)

    async def check(self) -> None:
        """Ask the worker to describe itself. Raises WorkerUnavailable if it does not, or if no engine is ready."""
        if self._stub is None:
            raise WorkerUnavailable(NOT_READY)
        try:
            await self._described(self._stub, without_files=True)
        except (grpc.aio.AioRpcError, *UNREADABLE) as error:
            raise WorkerUnavailable(NOT_READY) from error

    def kv_events(self, *, blocks: bool) -> AsyncGenerator[KvEvents, None]:
        """Yield the images and, with *blocks*, the blocks that the worker holds: a snapshot, then increments.

        Raises WorkerUnavailable if there is no feed, or it ends. Then discard what it reported, and call again.
        """
        if self._session is None:
            raise WorkerUnavailable(NOT_READY)
        return feed.follow(self._stub, blocks=blocks)

    def generate(self, request: EngineRequest, sink: Sink, chat: object = None) -> Stream:
        """Send *request*; the deltas of its samples go to *sink*.

        Raises WorkerUnavailable if no engine is ready, and ImageTooLarge for more inline pixels than a message holds.
        The sink fails with WorkerFailed if the engine dies, and with the error of a delta that has one.
        """
        return self._session_for(request).submit(request, sink)

    def reset_caches(self, *, prefix: bool, media: bool) -> bool:
        """Tell the worker to drop unused KV blocks and encoder outputs. Return whether it accepts such a command."""
        if self._session is None or self.description is None or not self.description.takes_resets:
            return False
        self._session.reset_caches(ResetCaches(prefix=prefix, media=media))
        return True

    async def _run(self) -> None:
        async with self.context.credentials.channel(self.url) as channel:
            self._stub = self.context.credentials.calls(channel)
            await super()._run()

    async def _live(self) -> str:
        """Get the description, open a stream, and relay its frames until it ends; return why it ended."""
        session, stub = _NativeSession(self.url, self.context.on_released), self._stub

        def take(payload: bytes) -> None:
            if payload == TAKEN:
                # The worker has accepted the stream.
                self._enter(session, description)
            else:
                self._take(session, session.frames.decode(payload))

        try:
            description = await self._describe(stub)
            path = stream_path(self.url)
            over_grpc = partial(_over_grpc, self.context.credentials, self.url)
            await (over_grpc(session, take) if path is None else _over_unix(path, session, take))
            return ENDED
        except ChannelClosed:
            return ENDED
        except grpc.aio.AioRpcError as error:
            self._log(error)
            return str(error.details())
        except UNREADABLE as error:
            logger.error("worker %s sent a frame that is not of this version of the wire: %s", self.url, error)
            return "malformed frame"
        finally:
            self._leave()

    async def _describe(self, stub: Any) -> Description:
        """Return the description of the worker, which sends its files only if no other worker has."""
        description = await self._described(stub, without_files=True)
        if not (digest := description.files_digest):
            return description
        async with self.context.known_files.turn(digest):
            files = self.context.known_files.find(digest)
            if files is None:
                description = await self._described(stub, without_files=False)
                if description.files_digest:
                    raise msgspec.ValidationError("a description lacks its files")
                return description
        return msgspec.structs.replace(description, files=files, files_digest=b"")

    async def _described(self, stub: Any, *, without_files: bool) -> Description:
        reply = await stub.Describe(DescribeRequest(without_files=without_files), timeout=DESCRIBE_SECONDS)
        return description_of(reply.description, self.context.known_files)

    def _log(self, error: grpc.aio.AioRpcError) -> None:
        """Log why there is no stream, once for each kind of reason until a stream opens."""
        code = error.code()
        if code not in self._logged:
            self._logged.add(code)
            level = logging.ERROR if code is grpc.StatusCode.UNAUTHENTICATED else logging.INFO
            logger.log(level, "worker %s cannot be reached, and is tried again: %s", self.url, error.details())

    def _take(self, session: _NativeSession, frame: StepFrame) -> None:
        if frame.load is not None:
            was_ready = self.ready
            self._note_load(frame.load, time.monotonic())
            if self.ready != was_ready:
                self.context.on_change(self)
        session.deliver(frame)

    def _enter(self, session: _NativeSession, description: Description) -> None:
        self._logged.clear()
        super()._enter(session, description)

    def _leave(self) -> None:
        session = self._session
        super()._leave()
        if session is not None:
            session.fail(LOST)


class _GrpcStream:
    """The receiver of a stream over gRPC: calls *take* with each frame until the stream has *ended*."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take

    def message(self, payload: bytes) -> None:
        """Take a frame, unless the stream has ended."""
        if self.ended.done():
            return
        try:
            self._take(WorkerFrame.FromString(payload).payload)
        except UNREADABLE as error:
            # Its traceback has the frame, and would keep it until cycles are collected.
            self.ended.set_exception(error.with_traceback(None))

    def end(self, status: grpc.StatusCode, details: str) -> None:
        """Complete *ended*, with gRPC's error unless *status* is OK."""
        if self.ended.done():
            return
        if status is grpc.StatusCode.OK:
            self.ended.set_result(None)
        else:
            nothing = grpc.aio.Metadata()
            self.ended.set_exception(grpc.aio.AioRpcError(status, nothing, nothing, details))


def _head(command: bytes) -> bytes:
    """Return what precedes *command* in a GatewayFrame: its field and length. protobuf would copy the command twice."""
    head, num_bytes = bytearray((GatewayFrame.PAYLOAD_FIELD_NUMBER << 3 | 2,)), len(command)
    while num_bytes > 0x7F:
        head.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    return bytes((*head, num_bytes))


async def _over_grpc(
    credentials: WorkerCredentials, url: str, session: _NativeSession, take: Callable[[bytes], None]
) -> None:
    """Send the commands of *session*, and call *take* with each frame until the stream ends.

    Raises gRPC's error, the error of a frame that is unreadable, or ChannelClosed if there is no connection.
    """
    # A message has a few bytes besides its frame.
    stream, calls = _GrpcStream(take), credentials.streams(url, lambda: session.frames.max_bytes + 16)
    metadata = [(name.encode(), value.encode()) for name, value in credentials.metadata]
    try:
        call = await calls.begin(f"/{SERVICE_NAME}/Stream", None, stream, metadata)
        session.write = lambda command: call.send(_head(command), command)
        await stream.ended
    except OSError as error:
        raise ChannelClosed from error
    finally:
        calls.close()


async def _over_unix(path: str, session: _NativeSession, take: Callable[[bytes], None]) -> None:
    """Do the same over the Unix socket at *path*. Raises ChannelClosed, and the error of a frame that is unreadable."""
    frames = Frames(take, lambda: session.frames.max_bytes)
    session.write = frames.send
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: frames, path)
    except OSError as error:
        raise ChannelClosed from error
    try:
        await lasting_task.until_one_ends(frames.ended(), _silence(frames))
    finally:
        frames.close()


async def _silence(frames: Frames) -> None:
    """Abort *frames* when nothing has arrived for SILENT_SECONDS."""
    last = -1
    while last != frames.num_received:
        last = frames.num_received
        await asyncio.sleep(SILENT_SECONDS)
        # If this process was paused, too, what has arrived is read first.
        await asyncio.sleep(0.1)
    logger.warning("a worker on this host has sent nothing for %g s and counts as lost", SILENT_SECONDS)
    frames.abort()
