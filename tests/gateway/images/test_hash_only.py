"""Images that the worker holds go by their hash: a real gateway before a real worker with a real engine. # F5"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import decode_servers
import numpy as np
from chats import data_url, random_image
from numpy.typing import NDArray
from waiting import until

from saccade.connectors.native.client import WorkerClient
from saccade.fleet.pool import WorkerPool
from saccade.gateway import app
from saccade.gateway.config import GatewayConfig
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.worker.service import WorkerConfig, WorkerFront

ONE_IMAGE_BYTES = 9 * 128 * 4 * 4
"""Of an image of 96 x 96 in the tiny model: tokens, hidden values, layers that it enters, bytes of a float."""

A, B = (data_url(random_image(96, 96, seed)) for seed in (1, 2))


class Stack:
    """Gateway and worker of one test."""

    def __init__(self, port: int, application: app.Application, client: WorkerClient, pool: DecodePool) -> None:
        self.port = port
        self.application = application
        self.client = client
        self.pool = pool
        self.believed = False
        """Whether the gateway believes that the worker holds every image."""

        self.sought: list[bytes] = []
        """The keys of the images that the gateway looked for."""

        # The same index that the gateway's look-ups use.
        index = application.routing.cache_view.router.index
        self._have_images = index.have_images
        index.have_images = self._found  # type: ignore[method-assign]

    async def ask(self, text: str, url: str) -> tuple[int, Any]:
        """Status and body of an answer about an image that comes behind *text*."""
        content = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
        address = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(address, json=body) as response:
            return response.status, await response.json()

    async def text(self, text: str, url: str) -> str:
        """The text of an answer, which there must be."""
        status, body = await self.ask(text, url)
        assert status == 200, body
        return str(body["choices"][0]["message"]["content"])

    def metric(self, name: str, **labels: str) -> float:
        return self.application.metrics.registry.get_sample_value(name, labels) or 0.0

    @property
    def counts(self) -> tuple[float, float, float]:
        """Images sent by hash, pixels wanted after all, images decoded."""
        decoded = self.metric("saccade_stage_seconds_count", stage="decode")
        return self.metric("saccade_images_by_hash_total"), self.metric("saccade_pixels_wanted_total"), decoded

    async def hears(self, image: bytes, held: bool) -> None:
        """Wait until the gateway has heard whether the worker holds *image*."""
        await until(lambda: self._have_images([image]).any() == held)

    def _found(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        self.sought += keys
        return self._have_images(keys) | self.believed


@contextlib.asynccontextmanager
async def running(folder: Path, socket: Path, encoder_cache_bytes: int) -> AsyncIterator[Stack]:
    engine = {
        "model_dir": str(folder),
        "model": "tiny",
        "device": "cpu",
        "num_blocks": 64,
        "encoder_cache_bytes": encoder_cache_bytes,
        "enable_prefix_caching": False,
    }
    command = [sys.executable, "-m", "saccade.engine", "--config", json.dumps(engine)]
    worker = WorkerFront(WorkerConfig(f"unix:{socket}/w.sock", command, shutdown_timeout_seconds=0), lambda _: None)
    config = GatewayConfig(num_decode_processes=1, mm_processor_cache_gb=0)
    with decode_servers.shared():
        pool = DecodePool(config)
    worker_pool = WorkerPool([worker.server.bind], pool.release)
    application = app.create_app(config, worker_pool, pool)
    listener = app.listen("127.0.0.1", 0)
    server = app.DrainingServer(application, GatewayConfig(shutdown_timeout_seconds=0))
    async with contextlib.AsyncExitStack() as stack:
        work = asyncio.create_task(worker.run())
        stack.push_async_callback(lambda: work)
        stack.callback(worker.stop)
        await worker.ready()
        for part in (pool, application, worker_pool):
            await part.start()
            stack.push_async_callback(part.close)
        serving = asyncio.create_task(server.serve([listener]))
        stack.push_async_callback(lambda: serving)
        stack.callback(server.handle_exit, 15, None)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/ready"
        status = 0
        while status != 200:
            async with aiohttp.ClientSession() as session, session.get(address) as response:
                status = response.status
        yield Stack(listener.getsockname()[1], application, worker_pool.clients[0], pool)  # type: ignore[arg-type]


async def test_images_are_sent_by_hash_while_the_worker_has_them(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    async with running(tiny_qwen3_vl, tmp_path, ONE_IMAGE_BYTES) as stack:
        expected = await stack.text("What is it?", A)
        held = stack.sought[-1]
        await stack.hears(held, True)
        assert stack.counts == (0, 0, 1)
        await stack.text("The same again, with other words", A)
        assert stack.counts == (1, 0, 1)

        async def evict() -> None:
            """Have the worker drop A for B, and the gateway believe that it holds A, as if the news had not come yet."""
            stack.believed = False
            await stack.text("And this?", B)
            await stack.hears(held, False)
            stack.believed = True

        await evict()
        assert await stack.text("What is it?", A) == expected
        assert stack.counts == (2, 1, 3)

        await evict()
        object.__setattr__(stack.application.media.pixels, "resend_seconds", 0)
        status, body = await stack.ask("What is it?", A)
        assert (status, body["error"]["code"]) == (503, "worker_unavailable")
        stack.believed = False
        await until(lambda: stack.client.state.load and stack.client.state.load.num_waiting == 0)
        assert await stack.text("What is it?", B)
        await until(lambda: stack.pool.num_slots == 0)  # decoding goes on where nobody waits for it any more
