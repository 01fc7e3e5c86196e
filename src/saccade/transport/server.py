"""The worker's end of the native wire: gRPC in front of whatever answers as a Front."""

import asyncio
import contextlib
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from saccade.errors import StartupError
from saccade.transport.connection import Connection, Front, Refused
from saccade.transport.proto import worker_pb2_grpc
from saccade.transport.proto.worker_pb2 import DescribeReply, KvEventsFrame, WorkerFrame
from saccade.transport.unix_streams import UnixStreams
from saccade.transport.wire import SERVER_OPTIONS, SERVICE_NAME, TAKEN, stream_path


class _Servicer(worker_pb2_grpc.WorkerServicer):
    """Translates between gRPC's calls and a Front."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Describe(self, request: Any, context: Any) -> DescribeReply:
        try:
            return DescribeReply(description=self._front.describe())
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
            watcher = self._front.watch(request.blocks, request.pictures)
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

    async def _read(self, commands: Any, connection: Connection) -> None:
        """Hand every command to the front; when the gateway has said its last, so has the worker."""
        reason = None
        try:
            async for frame in commands:
                self._front.receive(connection, frame.payload)
        except Refused as refused:
            reason = refused
        finally:
            connection.end(reason)


class WorkerServer:
    """The gRPC server of one worker, with grpc.health.v1 and reflection; not serving until told otherwise.

    At a Unix socket it takes streams beside gRPC, too, at the path that ends in `.stream`.
    """

    def __init__(self, front: Front, bind: str) -> None:
        """*bind* is `host:port` (port 0: any free one) or `unix:/path`."""
        self.bind = bind
        self.port = 0
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        worker_pb2_grpc.add_WorkerServicer_to_server(_Servicer(front), self._server)  # type: ignore[no-untyped-call]
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        path = stream_path(bind)
        self._streams = UnixStreams(front, path) if path is not None else None

    @property
    def address(self) -> str:
        """The url that a gateway connects to."""
        return self.bind if self.bind.startswith("unix:") else f"grpc://{self.bind.rpartition(':')[0]}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises StartupError where the address cannot be had."""
        await self.set_ready(False)
        try:
            if self._streams is not None:
                await self._streams.start()
            self.port = self._server.add_insecure_port(self.bind)
        except (RuntimeError, OSError) as error:
            raise StartupError(f"The worker cannot listen on {self.bind}: is the address in use?") from error
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """Say SERVING or NOT_SERVING to whoever asks for the health of the worker or of its service."""
        statuses = health_pb2.HealthCheckResponse
        for name in (health.OVERALL_HEALTH, SERVICE_NAME):
            await self._health.set(name, statuses.SERVING if ready else statuses.NOT_SERVING)

    async def stop(self) -> None:
        """Stop listening and cancel what is left."""
        with contextlib.suppress(asyncio.CancelledError):
            await self._health.enter_graceful_shutdown()
            if self._streams is not None:
                self._streams.stop()
            await self._server.stop(grace=0.5)
