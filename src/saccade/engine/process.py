"""The engine's process, which accepts commands, runs steps while there is work, and sends their output."""

import gc
import time

import msgspec
import structlog

from saccade.engine.config import EngineConfig
from saccade.engine.core.cache_events import WatchedCaches
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.errors import InvalidValue, StartupError
from saccade.protocol.engine_ipc import (
    Drain,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineStep,
    Forward,
    FrontMessage,
    Hangup,
    Shutdown,
    Unwatch,
    Watch,
)
from saccade.protocol.engine_load import Load
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand, ResetCaches, SupplyPixels
from saccade.transport import partial_decode
from saccade.transport.engine_channel import EngineChannel
from saccade.transport.framing import UNREADABLE

HEARTBEAT_SECONDS = 0.5
LOAD_SECONDS = 0.25

logger = structlog.get_logger(__name__)


def run_engine(config: EngineConfig, channel: EngineChannel) -> int:
    """Load the model, then serve until Shutdown. Return the process's exit status. Raises ChannelClosed."""

    def progress(stage: str, done: int, total: int) -> None:
        channel.send(EngineProgress(stage, done, total))

    # Compiling kernels creates millions of objects; collecting garbage meanwhile takes a fifth of the start.
    gc.disable()
    try:
        engine = start(config, progress)
    except StartupError as error:
        channel.send(EngineFailed(error.message))
        return 1
    # Objects that exist now live until the end; freezing them spares the collector a scan that would slow down a step.
    gc.collect()
    gc.freeze()
    gc.enable()
    channel.send(EngineReady(engine.description))
    try:
        Loop(engine, channel).run()
    finally:
        engine.close()
    return 0


class Loop:
    """The process's main loop, which ends on Shutdown, or when the front is gone."""

    def __init__(self, engine: Engine, channel: EngineChannel) -> None:
        self.engine = engine
        self.channel = channel
        self.iteration = 0
        self.load_sent_at = 0.0
        self.draining = False
        transfers = engine.kv_connector.transfers
        self._wake_fds = () if transfers is None else (transfers.wake_fd,)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[GatewayCommand] = msgspec.msgpack.Decoder(GatewayCommand)

    def run(self) -> None:
        """Take messages and run steps, until Shutdown comes. Raises ChannelClosed when the front is gone."""
        while True:
            busy = self.engine.has_work or self.engine.feed.busy
            for message in self.channel.receive(0 if busy else HEARTBEAT_SECONDS, self._wake_fds):
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            self.iteration += 1
            has_work = self.engine.has_work
            frames = self.engine.step() if has_work else {}
            encoded = [(connection, self._encoder.encode(frame)) for connection, frame in frames.items()]
            self.channel.send(EngineStep(self.iteration, encoded, self._load(has_work)))
            for events in self.engine.feed.take_messages():
                self.channel.send(events)

    def _load(self, stepped: bool) -> Load | None:
        now = time.monotonic()
        drained = stepped and not self.engine.has_work
        if not drained and now - self.load_sent_at < LOAD_SECONDS:
            return None
        self.load_sent_at = now
        return msgspec.structs.replace(self.engine.load(), draining=self.draining)

    def _take(self, message: FrontMessage) -> None:
        match message:
            case Forward(connection, command):
                self._command(connection, command)
            case Hangup(connection):
                self.engine.requests.hangup(connection)
            case Watch(watcher, blocks, images):
                self.engine.feed.watch(watcher, WatchedCaches(blocks, images))
            case Unwatch(watcher):
                self.engine.feed.unwatch(watcher)
            case Drain():
                self.draining, self.load_sent_at = True, 0.0

    def _command(self, connection: int, encoded: bytes) -> None:
        try:
            command = self._decoder.decode(encoded)
        except UNREADABLE:
            request_id = partial_decode.salvage(encoded).request_id
            logger.warning("dropped a malformed command", request_id=request_id, connection=connection)
            if request_id is not None:
                self.engine.requests.refuse(
                    connection, request_id, InvalidValue("The worker could not read this request.")
                )
            return
        match command:
            case EngineRequest():
                self.engine.requests.submit(connection, command)
            case SupplyPixels():
                self.engine.requests.supply(connection, command)
            case Abort(request_id=request_id, index=index):
                self.engine.requests.abort(connection, request_id, index)
            case ResetCaches(prefix=prefix, media=media):
                self.engine.scheduler.reset_caches(prefix=prefix, media=media)
