"""A TokenSpeed worker without an engine, on the real contract: it answers what a test tells it to."""

import asyncio
import hashlib
import io
import itertools
import os
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc
from waiting import until

from saccade.connectors.context import ClientContext, Traits
from saccade.connectors.smg.tokenspeed import TokenSpeedClient
from saccade.protocol.description import ModelFiles
from saccade.protocol.media import MediaItem, SlotRef, Span
from saccade.protocol.request import EngineRequest, SamplingParams
from saccade.transport import shared_memory
from saccade.transport.shared_memory import SlotPool

PIXELS = bytes(range(96))
FILES = ModelFiles(files={"config.json": b"{}", "tokenizer.json": b'{"a": 1}'})
PLACEHOLDER = 262


def chunk(*token_ids: int, **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=token_ids, **fields))


def complete(*token_ids: int, reason: str = "stop", **fields: Any) -> pb.GenerateResponse:
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=token_ids, finish_reason=reason, **fields))


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


class TokenSpeedWorker(rpc.TokenSpeedSchedulerServicer):
    """*script* makes of a request what is sent back: responses, a number of seconds to wait, or a status to end with."""

    def __init__(self) -> None:
        self.script: list[Any] = [chunk(1, 2, cached_tokens=3), complete(1, 2, reason="length")]
        self.consume: Callable[[pb.TensorData], bytes] | None = None
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, str] = {}
        self.pixels: list[bytes] = []
        self.aborted: list[str] = []
        self.cancelled = 0
        self.finished = 0
        self.healthy = True
        self.info: dict[str, Any] = {
            "served_model_name": "m",
            "max_context_length": 4096,
            "eos_token_ids": [7],
            "model_dtype": "bfloat16",
            "multimodal_encoder_dtype": "bfloat16",
        }
        self.shm_namespace = shared_memory.namespace()
        self.bundle = zipped(FILES.files)
        self.digest: str | None = None
        self.events: list[Any] | None = None
        self.arguments: dict[str, Any] = {"max_num_seqs": 8, "block_size": 16}
        load = {"num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 32, "max_total_num_tokens": 1024}
        self.loads: list[dict[str, int]] = [load]
        self.num_asked_for_loads = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if self.consume is not None:
            self.pixels += [self.consume(item.encoder_input) for item in request.mm_inputs.items]
        try:
            for step in self.script:
                match step:
                    case pb.GenerateResponse():
                        yield step
                    case grpc.StatusCode():
                        await context.abort(step, "words of the engine's")
                    case _:
                        await asyncio.sleep(step)
            self.finished += 1
        except (asyncio.CancelledError, GeneratorExit):
            # A call that ends while a response is on its way closes the generator, which waits in its yield.
            self.cancelled += 1
            raise

    async def HealthCheck(self, request: Any, context: Any) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=self.healthy)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self.aborted.append(request.request_id)
        return pb.AbortResponse(success=True)

    async def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(**self.info)

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        reply = pb.GetServerInfoResponse(max_total_num_tokens=1024, tokenspeed_version="9")
        reply.server_args.update(self.arguments)
        reply.scheduler_info.update({"shm_namespace_id": self.shm_namespace})
        return reply

    async def GetLoads(self, request: Any, context: Any) -> pb.GetLoadsResponse:
        self.num_asked_for_loads += 1
        return pb.GetLoadsResponse(loads=[pb.SchedulerLoad(**load) for load in self.loads])

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Send *events*: batches, or a status to end with."""
        if self.events is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "words of the engine's")
        await context.send_initial_metadata(())
        for number in itertools.count():
            await until(lambda number=number: len(self.events or ()) > number)
            event = (self.events or [])[number]
            if isinstance(event, grpc.StatusCode):
                await context.abort(event, "words of the engine's")
            yield event

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        half = len(self.bundle) // 2
        yield common_pb2.GetTokenizerChunk(data=self.bundle[:half])
        digest = hashlib.sha256(self.bundle).hexdigest() if self.digest is None else self.digest
        yield common_pb2.GetTokenizerChunk(data=self.bundle[half:], sha256=digest)


@asynccontextmanager
async def listening(servicer: rpc.TokenSpeedSchedulerServicer, port: int = 0) -> AsyncIterator[str]:
    """Serve on loopback; yield the worker's url."""
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    rpc.add_TokenSpeedSchedulerServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"tokenspeed://127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


class Slots:
    """A pool, and what a client gave back to it."""

    def __init__(self) -> None:
        self.pool = SlotPool(1 << 24)
        self.released: list[str] = []
        self.discarded: list[str] = []

    def filled(self, pixels: bytes = PIXELS) -> SlotRef:
        slot = self.pool.acquire(len(pixels))
        assert slot is not None
        with shared_memory.open_slot(slot.ref) as data:
            data[:] = pixels
        return slot.ref

    def links(self) -> list[Path]:
        """Names in /dev/shm that are none of the pool's and share a segment with it."""
        own = {path.stat().st_ino for path in shared_memory.FOLDER.glob(f"saccade-{os.getpid()}-*")}
        # By their directory entries: names of other processes may be gone before they are looked at.
        entries = [entry for entry in os.scandir(shared_memory.FOLDER) if entry.name.startswith("smg-tokenspeed-")]
        return [Path(entry) for entry in entries if entry.inode() in own]


def context(slots: Slots, **options: Any) -> ClientContext:
    fields: dict[str, Any] = {
        "on_released": slots.released.extend,
        "on_discarded": slots.discarded.extend,
        "traits": lambda _: Traits(grid_name="a_grid", plain_positions=True),
    }
    return ClientContext(**(fields | options))


@asynccontextmanager
async def registered(url: str, slots: Slots, **options: Any) -> AsyncIterator[TokenSpeedClient]:
    client = TokenSpeedClient(url, context(slots, **options))
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
    finally:
        await client.close()


def image(slot: SlotRef | None = None, start: int = 1, **fields: Any) -> MediaItem:
    """An image of 2 x 4 patches of six bfloat16 and two tokens."""
    described: dict[str, Any] = {
        "modality": "image",
        "content_hash": bytes(range(32)),
        "grid": (1, 2, 4),
        "spans": (Span(start, 2),),
        "pixel_shape": (8, 6),
        "pixel_dtype": "bfloat16",
        "slot": slot,
    }
    return MediaItem(**(described | fields))


def ask(*media: MediaItem, name: str = "r1", **sampling: Any) -> EngineRequest:
    token_ids = [5, *[PLACEHOLDER] * 2 * max(1, len(media)), 6]
    return EngineRequest(
        request_id=name,
        token_ids=token_ids,
        sampling=SamplingParams(**({"max_tokens": 10, "stop_token_ids": (7,)} | sampling)),
        media=media,
    )
