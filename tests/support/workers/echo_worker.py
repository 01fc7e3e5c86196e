"""Workers with an echo engine, for tests that need a real worker and no model."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from streams import generate
from waiting import until

from saccade.connectors.context import ClientContext
from saccade.connectors.native.client import WorkerClient
from saccade.protocol.media import MediaItem, SlotRef, Span
from saccade.protocol.request import EngineRequest, SamplingParams
from saccade.worker.engine_process import TIMEOUTS, Timeouts
from saccade.worker.service import WorkerConfig, WorkerFront

ECHO_ENGINE = Path(__file__).parents[2] / "worker" / "echo_engine.py"
FAIL, STALL = 666, 777
WAIT_SECONDS = 60


def command(**settings: object) -> list[str]:
    return [sys.executable, str(ECHO_ENGINE), "--config", json.dumps(settings)]


def ask(name: str, token_ids: list[int], *slots: str, generation: int = 1) -> EngineRequest:
    media = tuple(
        MediaItem(
            modality="image",
            content_hash=bytes(32),
            grid=(1, 2, 2),
            spans=(Span(0, 1),),
            pixel_shape=(4, 12),
            slot=SlotRef(name=slot, generation=generation, nbytes=48),
        )
        for slot in slots
    )
    return EngineRequest(request_id=name, token_ids=token_ids, sampling=SamplingParams(max_tokens=100), media=media)


@asynccontextmanager
async def serving(
    folder: Path, timeouts: Timeouts = TIMEOUTS, shutdown_timeout: float = 0.0, **settings: object
) -> AsyncIterator[WorkerFront]:
    """A worker at `unix:FOLDER/w.sock` with an echo engine that is ready."""
    config = WorkerConfig(f"unix:{folder}/w.sock", command(**settings), timeouts, shutdown_timeout)
    async with running(config) as worker:
        yield worker


@asynccontextmanager
async def running(config: WorkerConfig) -> AsyncIterator[WorkerFront]:
    """A worker whose engine is ready."""
    worker = WorkerFront(config, lambda _: None)
    task = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await worker.ready()
        yield worker
    finally:
        worker.stop()
        await task


@asynccontextmanager
async def connected(worker: WorkerFront, **options) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(worker.server.bind, ClientContext(**options))
    await client.start()
    try:
        await until(lambda: client.ready)
        yield client
    finally:
        await client.close()


async def tokens(client: WorkerClient, request: EngineRequest) -> list[int]:
    return [token for delta in [delta async for delta in generate(client, request)] for token in delta.token_ids]
