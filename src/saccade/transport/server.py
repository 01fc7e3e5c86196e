"""The worker's end of the native wire: a gRPC server, with health and reflection, that calls a Front."""

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from saccade.errors import StartupError
from saccade.transport import private_sockets
from saccade.transport.access import OWNER_ONLY, Access
from saccade.transport.gateway_streams import Front, GatewayStream, Refused, UnixStreams
from saccade.transport.proto.worker_pb2 import DescribeReply, KvEventsFrame, WorkerFrame
from saccade.transport.wire import CALLS, SERVER_OPTIONS, SERVICE_NAME, TAKEN, TLS_SCHEME, stream_path

MAX_HEALTH_WATCHERS = 64

logger = logging.getLogger(__name__)


class _Servicer:
    """Translates gRPC calls into calls to a Front; it has one method for each of CALLS."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to a server."""
        methods = {
            name: getattr(grpc, f"{kind}_rpc_method_handler")(
                getattr(self, name), request.FromString, reply.SerializeToString
            )
            for name, (kind, request, reply) in CALLS.items()
        }
        return grpc.method_handlers_generic_handler(SERVICE_NAME, methods)

    async def Describe(self, request: Any, context: Any) -> DescribeReply:
        try:
            return DescribeReply(description=self._front.describe(without_files=request.without_files))
        except Refused as reason:
            await context.abort(reason.status, reason.sentence)
            raise

    async def Stream(self, commands: Any, context: Any) -> None:
        try:
            connection = self._front.open()
        except Refused as reason:
            await context.abort(reason.status, reason.sentence)
            raise
        reader = asyncio.create_task(self._read(commands, connection))
        try:
            await context.write(WorkerFrame(payload=TAKEN))
            while (frame := await connection.next()) is not None:
                await context.write(WorkerFrame(payload=frame))
        except Refused as reason:
            await context.abort(reason.status, reason.sentence)
        finally:
            self._front.hang_up(connection)
            reader.cancel()

    async def KvEvents(self, request: Any, context: Any) -> None:
        try:
            watcher = self._front.watch(request.blocks, request.images)
        except Refused as reason:
            await context.abort(reason.status, reason.sentence)
            raise
        try:
            while (payload := await watcher.next()) is not None:
                await context.write(KvEventsFrame(payload=payload))
        except Refused as reason:
            await context.abort(reason.status, reason.sentence)
        finally:
            self._front.hang_up(watcher)

    async def _read(self, commands: Any, connection: GatewayStream) -> None:
        """Pass every command to the front. End the connection when the gateway's side ends or a command is refused."""
        reason = None
        try:
            async for frame in commands:
                self._front.receive(connection, frame.payload)
        except Refused as refused:
            reason = refused
        finally:
            connection.end(reason)


class _Health:
    """Serves grpc.health.v1 to everyone. Clients without credentials can neither fill the worker's memory nor block it.

    The worker and its only service have the same state, so the name in a request is not read. Although a message may
    have MAX_MESSAGE_BYTES on this port, unread data stays within gRPC's flow control.
    """

    def __init__(self) -> None:
        self._ready = False
        self._changed = asyncio.Event()
        self._num_watchers = 0

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to a server."""
        encode = health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=encode),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=encode),
        }
        return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)

    def set_ready(self, ready: bool) -> None:
        """Report SERVING or NOT_SERVING from now on."""
        if ready != self._ready:
            self._ready = ready
            self._changed.set()
            self._changed = asyncio.Event()

    async def _check(self, _: Any, context: Any) -> Any:
        return self._reply()

    async def _watch(self, _: Any, context: Any) -> None:
        if self._num_watchers >= MAX_HEALTH_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Too many watch the health of this worker.")
        self._num_watchers += 1
        try:
            while True:
                changed = self._changed
                await context.write(self._reply())
                await changed.wait()
        finally:
            self._num_watchers -= 1

    def _reply(self) -> Any:
        statuses = health_pb2.HealthCheckResponse
        return statuses(status=statuses.SERVING if self._ready else statuses.NOT_SERVING)


class WorkerServer:
    """The gRPC server of one worker, with grpc.health.v1 and reflection. It reports NOT_SERVING until set_ready(True).

    If it binds to a Unix socket, it also accepts streams without gRPC, at the same path with `.stream` added.
    """

    def __init__(self, front: Front, bind: str, access: Access = OWNER_ONLY) -> None:
        """*bind* is `host:port` or `unix:/path`, and port 0 takes any free port; *access* decides who may call."""
        self.bind = bind
        self.port = 0
        self._access = access
        self._server = grpc.aio.server(interceptors=access.interceptors(), options=SERVER_OPTIONS)
        self._health = _Health()
        self._server.add_generic_rpc_handlers((self._health.handler(), _Servicer(front).handler()))
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        path = stream_path(bind)
        self._streams = UnixStreams(front, path, access) if path is not None else None

    @property
    def address(self) -> str:
        """The URL that a gateway connects to."""
        if self.bind.startswith("unix:"):
            return self.bind
        scheme = TLS_SCHEME if self._access.identity is not None else "grpc://"
        return f"{scheme}{self.bind.rpartition(':')[0]}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises StartupError if the address is not available, or if Access.check() refuses it."""
        self._access.check(self.bind)
        try:
            if self._streams is not None:
                await self._listen_on_sockets(self._streams)
            else:
                self.port = self._add_port()
        except (RuntimeError, OSError) as error:
            raise StartupError(f"The worker cannot listen on {self.bind}: is the address in use?") from error
        await self._server.start()
        for sentence in self._access.remarks(self.bind):
            logger.warning(sentence)

    async def _listen_on_sockets(self, streams: UnixStreams) -> None:
        path = Path(self.bind.removeprefix("unix:"))
        private_sockets.prepare_folder(path, self._access.allowed_uids)
        await streams.start()
        with private_sockets.owner_only():
            self._add_port()
        private_sockets.admit(path, self._access.allowed_uids)

    def _add_port(self) -> int:
        secrets = self._access.server_credentials()
        if secrets is None:
            return int(self._server.add_insecure_port(self.bind))
        return int(self._server.add_secure_port(self.bind, secrets))

    def set_ready(self, ready: bool) -> None:
        """Report SERVING or NOT_SERVING as the health of the worker and of its service."""
        self._health.set_ready(ready)

    async def stop(self) -> None:
        """Stop listening, and cancel calls that have not ended after half a second."""
        with contextlib.suppress(asyncio.CancelledError):
            self._health.set_ready(False)
            if self._streams is not None:
                self._streams.stop()
            await self._server.stop(grace=0.5)
