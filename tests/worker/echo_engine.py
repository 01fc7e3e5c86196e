"""A stand-in for the engine that speaks the local channel: it answers a prompt with the prompt, one token a step.

Run as a program: `echo_engine.py --config JSON --fd N`. The JSON's keys are Settings. A request whose first token is
FAIL ends with a failure; one whose first token is STALL never ends.
"""

import argparse
import os
import socket
import sys
import time

import msgspec

from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.engine_ipc import (
    CacheEvents,
    Drain,
    EngineFailed,
    EngineProgress,
    EngineReady,
    EngineStep,
    Forward,
    Hangup,
    Shutdown,
    Watch,
)
from saccade.protocol.engine_load import Load
from saccade.protocol.kv_events import KvEvents
from saccade.protocol.output import Failure, FinishReason, StepFrame, TokenDelta
from saccade.protocol.request import EngineRequest, GatewayCommand, ResetCaches
from saccade.transport.engine_channel import EngineChannel
from saccade.transport.framing import ChannelClosed

FAIL, STALL = 666, 777
LOAD_SECONDS = 0.25


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """*failure* stops the start; *journal* is a file that gets a line for every abort, hangup and inline image."""

    model: str = "echo"
    aliases: tuple[str, ...] = ()
    fingerprint: str = "f"
    shm_namespace: str = "here"
    failure: str | None = None
    exit_code: int = 0
    journal: str | None = None
    step_seconds: float = 0.001
    stamped: bool = False


class EchoEngine:
    """Every open request, by (connection, id), with what is left of its answer."""

    def __init__(self, settings: Settings, channel: EngineChannel) -> None:
        self.settings = settings
        self.channel = channel
        self.running: dict[tuple[int, str], list[int]] = {}
        self.released: dict[int, list[str]] = {}
        self.draining = False
        self.load_told: Load | None = None
        self.load_told_at = 0.0
        self.commands = msgspec.msgpack.Decoder(GatewayCommand)

    def loop(self) -> None:
        """Take what came, answer one token to each, for ever."""
        iteration = 0
        while True:
            for message in self.channel.receive(self.settings.step_seconds if self.running else 0.2):
                self.take(message)
            iteration += 1
            frames = self.frames()
            self.channel.send(EngineStep(iteration, frames, self.load()))

    def load(self) -> Load | None:
        """What is to be told of the load: whenever it has changed, and now and then."""
        load, now = Load(num_running=len(self.running), draining=self.draining), time.monotonic()
        if load == self.load_told and now - self.load_told_at < LOAD_SECONDS:
            return None
        self.load_told, self.load_told_at = load, now
        return load

    def take(self, message) -> None:
        match message:
            case Forward(connection=connection, command=command):
                self.command(connection, self.commands.decode(command))
            case Hangup(connection=connection):
                self.note(f"hangup {connection}")
                self.running = {key: left for key, left in self.running.items() if key[0] != connection}
            case Watch(watcher=watcher):
                snapshot = KvEvents(0, [], snapshot=True, last=True)
                self.channel.send(CacheEvents([watcher], msgspec.msgpack.encode(snapshot)))
            case Drain():
                self.draining = True
            case Shutdown():
                sys.exit(0)

    def command(self, connection: int, command) -> None:
        if isinstance(command, EngineRequest):
            self.running[connection, command.request_id] = command.token_ids[: command.sampling.max_tokens]
            for item in command.media:
                if item.inline is not None:
                    self.note(f"inline {item.inline.hex()}")
            self.released.setdefault(connection, []).extend(item.slot.name for item in command.media if item.slot)
        elif isinstance(command, ResetCaches):
            self.note(f"reset prefix={command.prefix} media={command.media}")
        else:
            self.note(f"abort {command.request_id}")
            self.running.pop((connection, command.request_id), None)

    def frames(self) -> list[tuple[int, bytes]]:
        deltas: dict[int, list[TokenDelta]] = {connection: [] for connection in self.released}
        for (connection, request_id), left in list(self.running.items()):
            if left[0] == STALL:
                continue
            delta = self.delta(request_id, left)
            if delta.finish_reason is not None:
                del self.running[connection, request_id]
            deltas.setdefault(connection, []).append(delta)
        released, self.released = self.released, {}
        return [
            (connection, msgspec.msgpack.encode(StepFrame(some, released.get(connection, []))))
            for connection, some in deltas.items()
        ]

    def delta(self, request_id: str, left: list[int]) -> TokenDelta:
        if left[0] == FAIL:
            return TokenDelta(request_id, [], FinishReason.ERROR, failure=Failure("invalid_value", "no", "messages"))
        token = left.pop(0)
        ids = [token, time.monotonic_ns()] if self.settings.stamped else [token]
        return TokenDelta(request_id, ids, None if left else FinishReason.LENGTH)

    def note(self, line: str) -> None:
        if self.settings.journal:
            with open(self.settings.journal, "a") as journal:
                journal.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="{}")
    parser.add_argument("--fd", type=int, required=True)
    arguments = parser.parse_args()
    settings = msgspec.json.decode(arguments.config, type=Settings)
    channel = EngineChannel(socket.socket(fileno=arguments.fd))
    channel.send(EngineProgress("loading weights", 1, 2))
    if settings.failure:
        channel.send(EngineFailed(settings.failure))
    if settings.failure or settings.exit_code:
        sys.exit(settings.exit_code or 1)
    if settings.journal:
        open(settings.journal, "a").close()
    channel.send(EngineReady(description(settings)))
    try:
        EchoEngine(settings, channel).loop()
    except ChannelClosed:
        os._exit(0)


def description(settings: Settings) -> Description:
    return Description(
        model=settings.model,
        aliases=settings.aliases,
        fingerprint=settings.fingerprint.encode(),
        files=ModelFiles(files={"config.json": b"{}"}),
        max_model_len=4096,
        max_num_seqs=8,
        block_size=16,
        num_blocks=64,
        dtype="float32",
        device="cpu",
        shm_namespace=settings.shm_namespace,
        version="0",
        takes_resets=True,
    )


if __name__ == "__main__":
    main()
