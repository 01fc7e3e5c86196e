"""A worker, which serves the native wire and relays encoded frames between gateways and one engine."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc
import msgspec

from saccade.errors import WorkerUnavailable
from saccade.identity.content import files_digest
from saccade.protocol.description import NO_FILES, Description
from saccade.protocol.engine_ipc import (
    CacheEvents,
    Drain,
    EngineMessage,
    EngineProgress,
    EngineReady,
    EngineStep,
    Forward,
    Hangup,
    Unwatch,
    Watch,
)
from saccade.protocol.output import Failure, FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand
from saccade.transport import lasting_task, partial_decode, shared_memory
from saccade.transport.access import OWNER_ONLY, Access
from saccade.transport.framing import UNREADABLE, Frames
from saccade.transport.gateway_streams import GatewayStream, Refused
from saccade.transport.server import WorkerServer
from saccade.worker.engine_process import TIMEOUTS, EngineProcess, Timeouts
from saccade.worker.tokenspeed.port import TokenSpeedPort

if TYPE_CHECKING:
    from saccade.worker.tokenspeed.server import TokenSpeedServer

SWEEP_AFTER_SECONDS = 1.0
SHUTTING_DOWN = "The worker is shutting down; send the request again, to another one."


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """*bind* is `host:port` or `unix:/path`; *engine_command* starts the engine, with `--fd N` added.

    After stop(), open requests have *shutdown_timeout_seconds* to finish. *tokenspeed* is the port of TokenSpeed's
    wire, if it is served too.
    """

    bind: str
    engine_command: Sequence[str]
    timeouts: Timeouts = TIMEOUTS
    shutdown_timeout_seconds: float = 30.0
    access: Access = OWNER_ONLY
    tokenspeed: TokenSpeedPort | None = None


class Relay:
    """A worker's Front: passes gateways' commands to the engine, and the engine's frames to gateways.

    The relay checks a command against its type before passing it on. It does not decode frames or events. Each stream
    has a number, and ends when the engine ends.
    """

    def __init__(self, config: WorkerConfig, on_progress: Callable[[EngineProgress], None]) -> None:
        self.engine = EngineProcess(config.engine_command, self._take, self.on_lost, config.timeouts)
        self.serving = asyncio.Event()
        self.changed = asyncio.Event()
        self.idle = asyncio.Event()
        self.draining = False
        self.has_stopped = False
        self.description: Description | None = None
        self.progress = on_progress
        self._connections: dict[int, GatewayStream] = {}
        self._watchers: dict[int, GatewayStream] = {}
        self._numbers = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._commands: msgspec.msgpack.Decoder[GatewayCommand] = msgspec.msgpack.Decoder(GatewayCommand)

    def described(self) -> Description:
        """Return the engine's description. Raises Refused until the engine is ready, and after drain()."""
        if self.draining:
            raise Refused(grpc.StatusCode.UNAVAILABLE, SHUTTING_DOWN)
        if self.description is None or not self.serving.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "The engine is starting.")
        return self.description

    def describe(self, *, without_files: bool = False) -> bytes:
        description = self.described()
        if without_files:
            digest = files_digest(description.files.files)
            description = msgspec.structs.replace(description, files=NO_FILES, files_digest=digest)
        return self._encoder.encode(description)

    def open(self, frames: Frames | None = None) -> GatewayStream:
        """Return a new connection for *frames*. Raises Refused as described() does."""
        self.described()
        connection = GatewayStream(next(self._numbers), frames)
        self._connections[connection.number] = connection
        return connection

    def drain(self) -> None:
        """Take no new requests. *idle* is set once the engine has no requests left, or if no engine is ready."""
        self.draining = True
        self.changed.set()
        if self.serving.is_set():
            self.engine.send(Drain())
        else:
            self.idle.set()

    def receive(self, connection: GatewayStream, command: bytes) -> None:
        """Pass a command to the engine, or refuse it here if it is malformed or too late.

        Raises Refused if it is malformed and has no request id.
        """
        try:
            decoded = self._commands.decode(command)
        except UNREADABLE:
            connection.send(self._encoder.encode(self._refusal(connection, command)))
            return
        if self.draining and isinstance(decoded, EngineRequest):
            connection.send(self._encoder.encode(_too_late(decoded)))
        else:
            self.engine.send(Forward(connection.number, command))

    def _refusal(self, connection: GatewayStream, command: bytes) -> StepFrame:
        """Abort the request of a malformed command, and return an answer that gives the command's slots back."""
        remains = partial_decode.salvage(command)
        if remains.request_id is None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "A frame is not a command of saccade.worker.v1.")
        self.engine.send(Forward(connection.number, self._encoder.encode(Abort(request_id=remains.request_id))))
        sentence = "The worker could not read the request: gateway and worker differ in version."
        failure = Failure("internal_error", sentence)
        delta = TokenDelta(remains.request_id, [], FinishReason.ERROR, failure=failure)
        return StepFrame([delta], list(remains.slots))

    def watch(self, blocks: bool, images: bool) -> GatewayStream:
        """Return a connection that carries the engine's cache events. Raises Refused as open() does."""
        watcher = self.open()
        del self._connections[watcher.number]
        self._watchers[watcher.number] = watcher
        self.engine.send(Watch(watcher.number, blocks, images))
        return watcher

    def hang_up(self, connection: GatewayStream) -> None:
        """Make the engine abort the requests of *connection*, or end its feed."""
        if self._watchers.pop(connection.number, None) is not None:
            self.engine.send(Unwatch(connection.number))
        if self._connections.pop(connection.number, None) is not None:
            self.engine.send(Hangup(connection.number))
            # The slots of a gateway that died are swept later: its streams end shortly before its process is gone.
            asyncio.get_running_loop().call_later(SWEEP_AFTER_SECONDS, self._sweep)

    def _sweep(self) -> None:
        # Once the worker has stopped, the loop may have no threads any more. The supervisor, or another worker, sweeps.
        if not self.has_stopped:
            asyncio.get_running_loop().run_in_executor(None, shared_memory.sweep)

    def _take(self, message: EngineMessage) -> None:
        match message:
            case EngineStep():
                self._relay(message)
            case CacheEvents(watchers, payload):
                for number in watchers:
                    if (watcher := self._watchers.get(number)) is not None:
                        watcher.send(payload)
            case EngineReady(description):
                self.description = description
                self.serving.set()
                self.changed.set()
            case EngineProgress():
                self.progress(message)

    def _relay(self, message: EngineStep) -> None:
        """Pass every frame to its connection, and the load to all of them."""
        for number, frame in message.frames:
            if (connection := self._connections.get(number)) is not None:
                connection.send(frame)
        if message.load is not None:
            load = self._encoder.encode(StepFrame([], load=message.load))
            for connection in self._connections.values():
                connection.send(load)
            if message.load.draining and not message.load.num_running + message.load.num_waiting:
                self.idle.set()

    def on_lost(self, sentence: str) -> None:
        """End every stream, and the requests on it, with *sentence*."""
        self.serving.clear()
        self.changed.set()
        if self.draining:
            self.idle.set()
        for connection in (*self._connections.values(), *self._watchers.values()):
            connection.end(Refused(grpc.StatusCode.UNAVAILABLE, sentence))
        self._connections.clear()
        self._watchers.clear()


def _too_late(request: EngineRequest) -> StepFrame:
    """Return the answer that refuses a request because the drain has begun, and gives its slots back."""
    failure = Failure(WorkerUnavailable.code, SHUTTING_DOWN)
    slots = [item.slot.name for item in request.media if item.slot is not None]
    return StepFrame([TokenDelta(request.request_id, [], FinishReason.ERROR, failure=failure)], slots)


def _tokenspeed_server(relay: Relay, port: TokenSpeedPort) -> "TokenSpeedServer":
    """Return the server of TokenSpeed's wire. Only workers that serve it import its modules."""
    from saccade.worker.tokenspeed.server import TokenSpeedServer

    return TokenSpeedServer(relay, relay.described, port)


class WorkerFront:
    """One worker: run() serves until stop() is called."""

    def __init__(self, config: WorkerConfig, on_progress: Callable[[EngineProgress], None]) -> None:
        self.relay = Relay(config, on_progress)
        self.server = WorkerServer(self.relay, config.bind, config.access)
        self.tokenspeed = _tokenspeed_server(self.relay, config.tokenspeed) if config.tokenspeed is not None else None
        self._shutdown_timeout_seconds = config.shutdown_timeout_seconds
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Drain; then run() ends the streams and the engine, and returns. A second call cuts the drain short."""
        if self._stopping.is_set():
            self.relay.idle.set()
        self._stopping.set()

    async def ready(self) -> Description:
        """Wait until the engine is ready for the first time; return its description."""
        await self.relay.serving.wait()
        if self.relay.description is None:
            raise RuntimeError("serving without a description")
        return self.relay.description

    async def run(self) -> None:
        """Serve until stop(). Raises StartupError if the address is not available or the engine cannot start."""
        await self.server.start()
        tasks: list[asyncio.Future[None]] = []
        try:
            if self.tokenspeed is not None:
                await self.tokenspeed.start()
            parts = (self.relay.engine.run(), self._tell_health(), self._drain())
            tasks += [asyncio.ensure_future(part) for part in parts]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.relay.has_stopped = True
            self.server.set_ready(False)
            await lasting_task.end(*tasks)
            if self.tokenspeed is not None:
                await self.tokenspeed.stop()
            await self.server.stop()

    async def _drain(self) -> None:
        await self._stopping.wait()
        self.relay.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._shutdown_timeout_seconds):
                await self.relay.idle.wait()

    async def _tell_health(self) -> None:
        while True:
            await self.relay.changed.wait()
            self.relay.changed.clear()
            self.server.set_ready(self.relay.serving.is_set() and not self.relay.draining)
