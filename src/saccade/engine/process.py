"""The engine's process: take commands, step while there is work, send what each step has to say."""

import gc
import logging
import time

import msgspec

from saccade.engine.config import EngineConfig
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.errors import InvalidValue, StartupError
from saccade.protocol.load import Load
from saccade.protocol.local import (
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineStep,
    Forward,
    FrontMessage,
    Hangup,
    Shutdown,
)
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand
from saccade.transport.local import ChannelClosed, EngineChannel

HEARTBEAT_SECONDS = 0.5
LOAD_SECONDS = 0.25

logger = logging.getLogger(__name__)


def run(config: EngineConfig, channel: EngineChannel) -> int:
    """Load the model, then serve until the front says so or is gone. Returns the process's exit status."""

    def progress(stage: str, done: int, total: int) -> None:
        channel.send(EngineProgress(stage, done, total))

    try:
        try:
            engine = start(config, progress)
        except StartupError as error:
            channel.send(EngineFailed(error.message))
            return 1
        # What lives now lives until the end: the collector need not look at it again, which would show as a slow step.
        gc.collect()
        gc.freeze()
        channel.send(EngineReady(engine.description))
        Loop(engine, channel).run()
    except ChannelClosed:
        # Slots belong to gateways, who free them when their worker goes; nothing else outlives this process.
        logger.info("the front is gone; the engine ends")
    return 0


class Loop:
    """What the process does until its front is gone."""

    def __init__(self, engine: Engine, channel: EngineChannel) -> None:
        self.engine = engine
        self.channel = channel
        self.iteration = 0
        self.load_sent_at = 0.0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[GatewayCommand] = msgspec.msgpack.Decoder(GatewayCommand)

    def run(self) -> None:
        """Take messages and step; raises ChannelClosed when the front is gone."""
        while True:
            for message in self.channel.receive(0 if self.engine.has_work else HEARTBEAT_SECONDS):
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            self.iteration += 1
            frames = self.engine.step() if self.engine.has_work else {}
            encoded = [(connection, self._encoder.encode(frame)) for connection, frame in frames.items()]
            self.channel.send(EngineStep(self.iteration, encoded, self._load(bool(frames))))

    def _load(self, stepped: bool) -> Load | None:
        now = time.monotonic()
        drained = stepped and not self.engine.has_work
        if not drained and now - self.load_sent_at < LOAD_SECONDS:
            return None
        self.load_sent_at = now
        return self.engine.load()

    def _take(self, message: FrontMessage) -> None:
        match message:
            case Forward(connection, command):
                self._command(connection, command)
            case Hangup(connection):
                self.engine.hangup(connection)

    def _command(self, connection: int, encoded: bytes) -> None:
        try:
            command = self._decoder.decode(encoded)
        except msgspec.DecodeError:
            request_id = _request_id(encoded)
            logger.warning("dropped a malformed command on connection %d (request %s)", connection, request_id)
            if request_id is not None:
                self.engine.refuse(connection, request_id, InvalidValue("The worker could not read this request."))
            return
        match command:
            case EngineRequest():
                self.engine.submit(connection, command)
            case Abort(request_id=request_id):
                self.engine.abort(connection, request_id)


def _request_id(encoded: bytes) -> str | None:
    """Return the id of a command that is well-formed MessagePack but no valid command."""
    try:
        match msgspec.msgpack.decode(encoded):
            case {"request_id": str(request_id)}:
                return request_id
    except msgspec.DecodeError:
        pass
    return None
