"""Hostile workers of a siege: honest until an attack lets them strike. They describe the bundled model by other names.

One sends frames over a Unix socket, one frames of HTTP/2 over TCP, one describes itself differently each time, and one
speaks vLLM's wire, whose cache events come from a publisher of its own.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
import vllm_worker
import zmq
import zmq.asyncio
from aiohttp import web
from fronts import DESCRIPTION, Front

from saccade.cli.bundled import bundled
from saccade.models.files import read_model_files
from saccade.protocol.request import GatewayCommand
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream
from saccade.transport.server import WorkerServer

HOST = "127.0.0.1"
STRIKE_SECONDS = 1.0
LOOK_SECONDS = 0.01
FLOOD_FRAMES = 4000
HUNG_UP, TAKEN = "hung up", "taken"
HEAD_BYTES = 9
"""Of a frame of HTTP/2, whose first three bytes are its length."""


def urls(folder: str, ports: Sequence[int]) -> tuple[str, ...]:
    """Return the addresses of the hostile workers in *folder* and at *ports*: of HTTP/2, of vLLM, of its publisher."""
    return (
        f"unix:{folder}/frames.sock",
        f"grpc://{HOST}:{ports[0]}",
        f"unix:{folder}/restless.sock",
        (f"vllm://{HOST}:{ports[1]}"),
    )


class HostileFront(Front):
    """A worker's front that answers nothing. While *changes*, each description has another name, and streams end."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.changes = False
        self.num_described = 0
        self._streams: dict[GatewayStream, asyncio.Event] = {}
        self._opened = asyncio.Event()
        self._description = msgspec.structs.replace(
            DESCRIPTION, model=model, files=read_model_files(bundled("model")), max_model_len=2048
        )

    def describe(self) -> bytes:
        """Return a description, of another name than before if it *changes*."""
        self.num_described += 1
        name = f"{self._description.model}-{self.num_described}" if self.changes else self._description.model
        return msgspec.msgpack.encode(msgspec.structs.replace(self._description, model=name))

    def open(self, frames: Frames | None = None) -> GatewayStream:
        """Return a stream, which ends soon if the description *changes*."""
        stream = super().open(frames)
        self._streams[stream] = asyncio.Event()
        self._opened.set()
        if self.changes:
            asyncio.get_running_loop().call_soon(stream.end)
        return stream

    def hang_up(self, connection: GatewayStream) -> None:
        """Forget the stream."""
        if (ended := self._streams.pop(connection, None)) is not None:
            ended.set()
        if not self._streams:
            self._opened.clear()

    def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
        """Do nothing with what the gateway says."""

    async def send(self, frame: bytes) -> str:
        """Send *frame* on a stream; return whether the gateway ended it within STRIKE_SECONDS."""
        answer = "no connection"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STRIKE_SECONDS):
                await self._opened.wait()
                answer = TAKEN
                stream, ended = next(iter(self._streams.items()))
                stream.send(frame)
                await ended.wait()
                answer = HUNG_UP
        return answer

    async def connect_again(self) -> str:
        """End the streams; return whether the gateway asks for the description again within STRIKE_SECONDS."""
        before = self.num_described
        for stream in tuple(self._streams):
            stream.end()
        await asyncio.sleep(STRIKE_SECONDS)
        return "asked again" if self.num_described > before else "left alone"


@dataclass
class Relay:
    """Passes bytes of gateways to the server at *port*, and its frames of HTTP/2 back; flood() adds others to them."""

    port: int
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection until either side ends it."""
        server_reader, server = await asyncio.open_connection(HOST, self.port)
        ways = [
            asyncio.create_task(_pass_bytes(reader, server)),
            asyncio.create_task(_pass_frames(server_reader, writer)),
        ]
        self.writers.add(writer)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.writers.discard(writer)
            for way in ways:
                way.cancel()
            writer.transport.abort()
            server.transport.abort()

    async def flood(self, frame: bytes, num_frames: int) -> str:
        """Send *frame* so often at a time on every connection, for STRIKE_SECONDS or until one of them has ended."""
        deadline = time.monotonic() + STRIKE_SECONDS
        struck = set(self.writers)
        while struck and struck <= self.writers and (seconds := deadline - time.monotonic()) > 0:
            for writer in struck:
                writer.write(frame * num_frames)
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(*(writer.drain() for writer in struck))
            # One frame at a time is as much as an honest server sends.
            await asyncio.sleep(seconds if num_frames == 1 else 0)
        if not struck:
            await asyncio.sleep(STRIKE_SECONDS)
            return "no connection"
        return TAKEN if struck <= self.writers else HUNG_UP


async def _pass_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


async def _pass_frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while head := await reader.readexactly(HEAD_BYTES):
            writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
            await writer.drain()


class Publisher:
    """A socket of cache events in vLLM's format at *port*, which sends what an attack wants."""

    def __init__(self, port: int) -> None:
        self._context: zmq.asyncio.Context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.bind(f"tcp://{HOST}:{port}")
        self._number = 0

    def close(self) -> None:
        """Stop publishing."""
        self._context.destroy(linger=0)

    async def publish(self, batch: bytes, most: int) -> str:
        """Publish *batch* again and again for STRIKE_SECONDS, at most so often."""
        deadline, count = time.monotonic() + STRIKE_SECONDS, 0
        while time.monotonic() < deadline:
            if count < most:
                await self._socket.send_multipart([b"kv", self._number.to_bytes(8, "big"), batch])
                self._number += 1
                count += 1
            await asyncio.sleep(LOOK_SECONDS if count == most else 0)
        return "published"


@dataclass(frozen=True)
class HostileWorkers:
    """The workers of urls(), each with its way to strike."""

    frames: HostileFront
    http2: Relay
    restless: HostileFront
    publisher: Publisher


@contextlib.asynccontextmanager
async def hostile_workers(folder: str, ports: Sequence[int]) -> AsyncIterator[HostileWorkers]:
    """Serve at urls() until the block ends."""
    fronts = HostileFront("frames"), HostileFront("http2"), HostileFront("restless")
    binds = f"unix:{folder}/frames.sock", f"{HOST}:0", f"unix:{folder}/restless.sock"
    servers = [WorkerServer(front, bind) for front, bind in zip(fronts, binds, strict=True)]
    relay = Relay(0)
    vllm = vllm_worker.VllmServer()
    vllm.root, vllm.names = str(bundled("model")), ["vllm"]
    vllm.sources = {"0": {**vllm_worker.SOURCE, "endpoint": f"tcp://*:{ports[2]}"}}
    publisher = Publisher(ports[2])
    runner = web.AppRunner(vllm.app(), shutdown_timeout=0)
    await runner.setup()
    try:
        for server in servers:
            await server.start()
        relay.port = servers[1].port
        listener = await asyncio.start_server(relay.serve, HOST, ports[0])
        await web.TCPSite(runner, HOST, ports[1]).start()
        yield HostileWorkers(fronts[0], relay, fronts[2], publisher)
        listener.close()
    finally:
        await runner.cleanup()
        publisher.close()
        for server in servers:
            await server.stop()
