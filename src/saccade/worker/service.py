"""A worker: the native wire in front, one engine behind, encoded frames relayed between them."""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence

import grpc
import msgspec

from saccade.protocol.description import Description
from saccade.protocol.local import EngineProgress, EngineStep, Forward, Hangup
from saccade.protocol.output import Failure, FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import GatewayCommand
from saccade.transport.server import Connection, Refused, WorkerServer
from saccade.worker.engine_process import PATIENCE, EngineProcess, Patience


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """*bind* is `host:port` or `unix:/path`; *engine_command* starts the engine, `--fd N` is added to it."""

    bind: str
    engine_command: Sequence[str]
    patience: Patience = PATIENCE


class _Named(msgspec.Struct, frozen=True):
    """What is read of a command that is malformed otherwise, to know whom to answer."""

    request_id: str


class Relay:
    """Stands between wire and engine: gives connections their numbers, passes commands up and frames down.

    It is the Front of the wire and the listener of the engine. A command is checked against its type before the engine
    sees it. Frames pass as they are. A stream ends when the engine behind it does.
    """

    def __init__(self, config: WorkerConfig, on_progress: Callable[[EngineProgress], None]) -> None:
        self.engine = EngineProcess(config.engine_command, self, config.patience)
        self.serving = asyncio.Event()
        self.changed = asyncio.Event()
        self.description: Description | None = None
        self.progress = on_progress
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._encoder = msgspec.msgpack.Encoder()
        self._commands: msgspec.msgpack.Decoder[GatewayCommand] = msgspec.msgpack.Decoder(GatewayCommand)
        self._names = msgspec.msgpack.Decoder(_Named)

    def describe(self) -> bytes:
        """Return the encoded Description. Raises Refused until the engine is ready."""
        if self.description is None or not self.serving.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "The engine is starting.")
        return self._encoder.encode(self.description)

    def open(self) -> Connection:
        """Return a new connection. Raises Refused until the engine is ready."""
        if not self.serving.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "The engine is starting.")
        connection = Connection(next(self._numbers))
        self._connections[connection.number] = connection
        return connection

    def receive(self, connection: Connection, command: bytes) -> None:
        """Pass a command to the engine; answer it here where it is malformed. Raises Refused where it has no id."""
        try:
            self._commands.decode(command)
        except msgspec.DecodeError:
            connection.send(self._encoder.encode(StepFrame([self._refusal(command)])))
        else:
            self.engine.send(Forward(connection.number, command))

    def _refusal(self, command: bytes) -> TokenDelta:
        try:
            request_id = self._names.decode(command).request_id
        except msgspec.DecodeError as error:
            sentence = "A frame is not a command of saccade.worker.v1."
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, sentence) from error
        sentence = "The worker could not read the request: gateway and worker differ in version."
        return TokenDelta(request_id, [], FinishReason.ERROR, failure=Failure("internal_error", sentence))

    def hang_up(self, connection: Connection) -> None:
        """Have the engine abort whatever came over *connection*."""
        if self._connections.pop(connection.number, None) is not None:
            self.engine.send(Hangup(connection.number))

    def ready(self, description: Description) -> None:
        """Open for gateways."""
        self.description = description
        self.serving.set()
        self.changed.set()

    def step(self, message: EngineStep) -> None:
        """Pass every frame to its connection, and the load to all of them."""
        for number, frame in message.frames:
            if (connection := self._connections.get(number)) is not None:
                connection.send(frame)
        if message.load is not None:
            load = self._encoder.encode(StepFrame([], load=message.load))
            for connection in self._connections.values():
                connection.send(load)

    def lost(self, sentence: str) -> None:
        """End every stream: what ran on it is lost."""
        self.serving.clear()
        self.changed.set()
        for connection in self._connections.values():
            connection.end(Refused(grpc.StatusCode.UNAVAILABLE, sentence))
        self._connections.clear()


class Worker:
    """One worker: run() serves until stop() is called."""

    def __init__(self, config: WorkerConfig, on_progress: Callable[[EngineProgress], None]) -> None:
        self.relay = Relay(config, on_progress)
        self.server = WorkerServer(self.relay, config.bind)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Have run() end the streams and the engine, and return."""
        self._stopping.set()

    async def ready(self) -> Description:
        """Wait until the engine is ready for the first time; return what it says of itself."""
        await self.relay.serving.wait()
        if self.relay.description is None:
            raise RuntimeError("serving without a description")
        return self.relay.description

    async def run(self) -> None:
        """Serve. Raises StartupError where the address cannot be had or the engine cannot start."""
        await self.server.start()
        parts = (self.relay.engine.run(), self._tell_health(), self._stopping.wait())
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await self.server.set_ready(False)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.server.stop()

    async def _tell_health(self) -> None:
        while True:
            await self.relay.changed.wait()
            self.relay.changed.clear()
            await self.server.set_ready(self.relay.serving.is_set())
