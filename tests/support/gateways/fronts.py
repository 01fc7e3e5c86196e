"""A front to be played by a test, and a client that talks to it over a real wire."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from waiting import until

from saccade.connectors.context import ClientContext
from saccade.connectors.native.client import WorkerClient
from saccade.protocol.description import Description, ModelFiles
from saccade.protocol.request import GatewayCommand
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream
from saccade.transport.server import WorkerServer

DESCRIPTION = Description(
    model="m",
    fingerprint=bytes(32),
    files=ModelFiles(files={}),
    max_model_len=4096,
    max_num_seqs=1,
    block_size=16,
    num_blocks=1,
    dtype="float32",
    device="cpu",
    shm_namespace="here",
    version="0",
)


class Front:
    """Remembers who came and what was asked, and says nothing; *watchers* are those of the feed, newest last."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.watchers: list[GatewayStream] = []
        self.watched: list[tuple[bool, bool]] = []
        self.left: list[GatewayStream] = []
        self.commands: list[GatewayCommand] = []

    def describe(self, *, without_files: bool = False) -> bytes:
        return msgspec.msgpack.encode(DESCRIPTION)

    def open(self, frames: Frames | None = None) -> GatewayStream:
        self.num_connections += 1
        return GatewayStream(self.num_connections, frames)

    def watch(self, blocks: bool, images: bool) -> GatewayStream:
        self.watchers.append(GatewayStream(100 + len(self.watchers)))
        self.watched.append((blocks, images))
        return self.watchers[-1]

    def receive(self, connection: GatewayStream, command: bytes) -> None:
        self.commands.append(msgspec.msgpack.decode(command, type=GatewayCommand))
        self.answer(connection, self.commands[-1])

    def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
        """Say what the test wants."""

    def hang_up(self, connection: GatewayStream) -> None:
        self.left.append(connection)


@asynccontextmanager
async def talking(
    bind: str, front: Front, on_released: Callable[[Sequence[str]], None] = lambda _: None
) -> AsyncIterator[WorkerClient]:
    """A client that is connected to *front* at *bind*."""
    server = WorkerServer(front, bind)
    await server.start()
    client = WorkerClient(server.address, ClientContext(on_released))
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
    finally:
        await client.close()
        await server.stop()
