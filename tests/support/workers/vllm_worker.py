"""A vLLM server without an engine: real HTTP on loopback, with the answers that vLLM 0.32 was seen to give."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pybase64
from aiohttp import web
from waiting import until

from saccade.connectors.context import ClientContext
from saccade.connectors.vllm.client import VllmClient
from saccade.protocol.description import ModelFiles
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams
from saccade.transport.credentials import NO_CREDENTIALS, WorkerCredentials

FILES = ModelFiles(files={"config.json": b"{}", "tokenizer.json": b'{"a": 1}'})
PLACEHOLDER = 262
PATCH = (3, 2, 2)
"""Channels, rows and columns of a patch."""

PIXELS = bytes(range(96))
"""Eight patches of one frame."""

METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_running{engine="1",model_name="m"} 30.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prompt_tokens_total{engine="0",model_name="m"} 3800.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1152.0
vllm:generation_tokens_total{engine="0",model_name="m"} 96.0
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7952540513046324e+09
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="0",num_gpu_blocks="64"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="True",engine="1",num_gpu_blocks="48"} 1.0
"""

SOURCE = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5701", "topic": "kv"}


def event(*token_ids: int, index: int = 0, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    """One event of an answer."""
    choice = {"index": index, "token_ids": list(token_ids), "finish_reason": reason, "logprobs": None, **fields}
    return {"request_id": "x", "output_mode": "tokens", "choices": [choice]}


def usage(cached: int | None = 3) -> dict[str, Any]:
    """The last event of an answer."""
    details = None if cached is None else {"cached_tokens": cached}
    return {"choices": [], "usage": {"prompt_tokens": 6, "completion_tokens": 2, "prompt_tokens_details": details}}


TWO_TOKENS = (event(1), event(2, reason="length"), usage())


def kwargs_data(
    pixels: bytes, shape: Sequence[int], grid: Sequence[int], dtype: str = "uint8", grid_name: str = "image_grid_thw"
) -> str:
    """An image as vLLM's processor leaves it, with vLLM's own order of keys."""
    numbers = b"".join(number.to_bytes(8, "little") for number in grid)
    field = {"keep_on_cpu": False, "slices": [[[0, shape[0], None]]], "dim": 0}
    item = {
        "pixel_values": {"data": [dtype, list(shape), msgspec.msgpack.Ext(3, pixels)], "field": ["flat", field]},
        grid_name: {
            "data": ["int64", [3], msgspec.msgpack.Ext(3, numbers)],
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    return pybase64.b64encode(msgspec.msgpack.encode(item)).decode()


def rendered(data: str | None = None) -> dict[str, Any]:
    """The answer to /render for the probe: two frames a patch."""
    given = kwargs_data(bytes(4 * 24), (4, 24), (1, 2, 2)) if data is None else data
    features = {"mm_hashes": {"image": ["h"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 1}]}}
    return {"token_ids": [5, PLACEHOLDER, 6], "features": {**features, "kwargs_data": {"image": [given]}}}


class VllmServer:
    """*script* is played to every request: events to send, seconds to wait, a status to answer with, or "break"."""

    def __init__(self) -> None:
        self.script: list[Any] = list(TWO_TOKENS)
        self.scripts: list[list[Any]] = []
        self.healthy = True
        self.key: str | None = None
        self.root = "/nowhere/model"
        self.names = ["m"]
        self.metrics = METRICS
        self.sources: dict[str, Any] = {"0": SOURCE}
        self.render: Any = rendered()
        self.requests: list[Any] = []
        self.headers: list[Any] = []
        self.paths: list[str] = []
        self.peers: set[int] = set()
        self.held: set[str] | None = None
        self.num_aborted = 0
        self.num_finished = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/version", self._json(lambda: {"version": "0.32.0"})),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._json(lambda: self.sources)),
                web.post("/v1/chat/completions/render", self._render),
                web.post("/v1/chat/completions", self._answer),
                web.post("/inference/v1/generate", self._answer),
            ]
        )
        return app

    def _json(self, content: Callable[[], Any]) -> Any:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(content())

        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        models = [{"id": name, "root": self.root, "parent": None, "max_model_len": 4096} for name in self.names]
        return web.json_response({"data": [*models, {"id": "adapter", "parent": "m", "max_model_len": 4096}]})

    async def _render(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.paths.append(request.path)
        if isinstance(self.render, int):
            return web.json_response({"error": {"message": "words of the engine's"}}, status=self.render)
        return web.json_response(self.render)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(request.headers)
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername")[1])
        self.paths.append(request.path)
        script = self.scripts.pop(0) if self.scripts else self.script
        if self._lacks_an_image(body):
            script = [{"error": {"message": "words of the engine's", "type": "InternalServerError", "code": 500}}]
        if script and isinstance(script[0], int):
            return web.json_response({"error": {"message": "words of the engine's"}}, status=script[0])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            for step in script:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif step == "break":
                    request.transport.abort()
                else:
                    data = step if isinstance(step, str) else json.dumps(step)
                    await response.write(f"data: {data}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
            self.num_finished += 1
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        return response

    def _lacks_an_image(self, body: Any) -> bool:
        """Keep the images that were sent with pixels; whether one went without that is not held."""
        features = body.get("features")
        if self.held is None or not features:
            return False
        pairs = list(zip(features["mm_hashes"]["image"], features["kwargs_data"]["image"], strict=True))
        lacks = any(data is None and name not in self.held for name, data in pairs)
        self.held |= {name for name, data in pairs if data is not None}
        return lacks


@asynccontextmanager
async def listening(server: VllmServer, tls: ssl.SSLContext | None = None, port: int = 0) -> AsyncIterator[str]:
    """Serve on loopback; yield the worker's url."""
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
    try:
        yield f"vllm{'s' if tls else ''}://{'localhost' if tls else '127.0.0.1'}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def connecting(
    url: str,
    model_files: dict[str, ModelFiles] | None = None,
    credentials: WorkerCredentials = NO_CREDENTIALS,
    read_files: Callable[[Path], ModelFiles] = lambda _: FILES,
    on_change: Callable[[VllmClient], None] = lambda _: None,
    on_released: Callable[[Sequence[str]], None] = lambda _: None,
) -> AsyncIterator[VllmClient]:
    """A client of *url* that may not be ready."""
    context = ClientContext(
        on_released,
        on_change,
        credentials=credentials,
        model_files={"m": FILES} if model_files is None else model_files,
        read_files=read_files,
        placeholder_id=lambda _: PLACEHOLDER,
    )
    client = VllmClient(url, context)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def registered(url: str, **options: Any) -> AsyncIterator[VllmClient]:
    async with connecting(url, **options) as client:
        await until(lambda: client.ready)
        yield client


def image(number: int = 0, start: int = 1, **fields: Any) -> MediaItem:
    """An image of 2 x 4 patches and two tokens."""
    described: dict[str, Any] = {
        "modality": "image",
        "content_hash": bytes([number]) * 32,
        "grid": (1, 2, 4),
        "spans": (Span(start, 2),),
        "pixel_shape": (8, 12),
        "inline": PIXELS,
    }
    return MediaItem(**(described | fields))


def ask(*media: MediaItem, name: str = "r1", salt: bytes = b"", num_samples: int = 1, **sampling: Any) -> EngineRequest:
    token_ids = [5, *[PLACEHOLDER] * 2 * max(1, len(media)), 6]
    return EngineRequest(
        request_id=name,
        token_ids=token_ids,
        sampling=SamplingParams(**({"max_tokens": 10, "stop_token_ids": (7,)} | sampling)),
        media=media,
        salt=salt,
        num_samples=num_samples,
    )
