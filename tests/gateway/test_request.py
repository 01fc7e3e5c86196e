"""A request that ends early, at whatever stage and for whatever reason, leaves nothing behind."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import msgspec
import psutil
import pytest
import scripted
from chats import data_url, random_image
from tables import table
from waiting import wait_until

from saccade.connectors.sink import Sink
from saccade.errors import WorkerFailed
from saccade.fleet.settings import DispatchLimits
from saccade.gateway.config import ConnectionLimits, GatewayConfig
from saccade.gateway.request import Limits, Request
from saccade.gateway.tenants.account import EVERYBODY, Account
from saccade.media.fetch import FetchConfig
from saccade.protocol.output import TokenDelta
from saccade.protocol.request import EngineRequest

IMAGE = {"type": "image_url", "image_url": {"url": data_url(random_image(64, 96, 1))}}
TOKEN = TokenDelta("r", [300])
LONG = 600.0
"""Seconds: what nobody waits for."""

DEFAULT = GatewayConfig()


def body(content: object, **fields: object) -> bytes:
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}).encode()


def send(connection: socket.socket, content: bytes, *, name: str = "it", length: int | None = None) -> None:
    """Send a request with the id *name*, of which *length* bytes are announced."""
    head = f"content-type: application/json\r\ncontent-length: {length or len(content)}\r\nx-request-id: {name}\r\n\r\n"
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + head.encode() + content)


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection, or the answer ends."""
    content = b""
    while piece := connection.recv(1 << 16):
        content += piece
        if content.endswith((b"}", b"0\r\n\r\n")):
            break
    return content


class Stage:
    """Stages at which a request can be held. Each sends it, waits until it is there, and lets others through after."""

    def __init__(self, gateway: scripted.Gateway, web: socket.socket, waiting: list[scripted.Step]) -> None:
        self.gateway = gateway
        self.web = web
        self.waiting = waiting

    @contextmanager
    def body(self, connection: socket.socket) -> Iterator[None]:
        send(connection, b" " * (2 << 20), length=4 << 20)
        wait_until(lambda: self.gateway.application.limits.memory.num_bytes)
        yield

    @contextmanager
    def fetch(self, connection: socket.socket) -> Iterator[None]:
        url = f"http://127.0.0.1:{self.web.getsockname()[1]}/"
        send(connection, body([{"type": "image_url", "image_url": {"url": url}}]))
        with self.web.accept()[0]:
            yield

    @contextmanager
    def place(self, connection: socket.socket) -> Iterator[None]:
        self.gateway.worker.script = self.waiting
        with socket.create_connection(connection.getpeername()) as other:
            send(other, body("hi"), name="other")
            wait_until(lambda: self.gateway.worker.requests)
            send(connection, body([IMAGE]))
            wait_until(lambda: self.gateway.metric("saccade_router_queue_pending_requests") == 1)
            yield

    @contextmanager
    def decode(self, connection: socket.socket) -> Iterator[None]:
        pids = self.gateway.worker.pool.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        send(connection, body([IMAGE]))
        wait_until(lambda: self.gateway.worker.pool.queue.num_running)
        yield
        for pid in filter(psutil.pid_exists, pids):
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def prepared(self, connection: socket.socket) -> Iterator[None]:
        """Its pixels are in slots, and no worker has been asked."""
        admission, is_there = self.gateway.application.limits.admission, threading.Event()
        turn = admission.turn

        @asynccontextmanager
        async def last_turn(num_bytes: int) -> AsyncIterator[None]:
            async with turn(num_bytes):
                if self.gateway.metric("saccade_slots_in_use"):
                    is_there.set()
                    await asyncio.sleep(LONG)
                yield

        with patch.object(admission, "turn", last_turn):
            send(connection, body([IMAGE]))
            assert is_there.wait(LONG)
            assert not self.gateway.worker.requests
            yield

    @contextmanager
    def first_token(self, connection: socket.socket) -> Iterator[None]:
        self.gateway.worker.script = self.waiting
        send(connection, body([IMAGE]))
        wait_until(lambda: self.gateway.worker.requests)
        yield

    @contextmanager
    def stream(self, connection: socket.socket) -> Iterator[None]:
        self.gateway.worker.script = [TOKEN, *self.waiting]
        send(connection, body([IMAGE], stream=True, n=2))
        assert b"200 OK" in connection.recv(1 << 16)
        yield


@contextmanager
def held(
    folder: Path, stage: str, config: GatewayConfig = DEFAULT, waiting: tuple[scripted.Step, ...] = (LONG,)
) -> Iterator[socket.socket]:
    """The connection of a request that waits at *stage*; at the end nothing of it is left."""
    config = replace(
        config,
        mm_processor_cache_gb=0,
        fetch=replace(config.fetch, allowed_networks=("127.0.0.1/32",)),
        dispatch=replace(config.dispatch, lone_worker_queue=0),
    )
    with scripted.running(folder, config) as gateway, socket.create_server(("127.0.0.1", 0)) as web:
        assert gateway.worker.state.description is not None
        gateway.worker.become(description=msgspec.structs.replace(gateway.worker.state.description, max_num_seqs=1))
        num_tasks = tasks(gateway)
        with (
            socket.create_connection(("127.0.0.1", gateway.port)) as connection,
            getattr(Stage(gateway, web, list(waiting)), stage)(connection),
        ):
            yield connection
        limits, router = gateway.application.limits, gateway.application.routing.cache_view.router
        wait_until(lambda: (limits.admission.num_requests, limits.memory.num_bytes, limits.pixels.weight) == (0, 0, 0))
        assert gateway.metric("saccade_router_queue_pending_requests") == 0
        assert not any(work.num_requests for work in router.works().values())
        # An image is decoded to its end.
        wait_until(lambda: gateway.metric("saccade_slots_in_use") == 0)
        wait_until(lambda: tasks(gateway) == num_tasks)
        gateway.line("it")
        assert gateway.worker.num_aborted == len(gateway.worker.requests)


def tasks(gateway: scripted.Gateway) -> int:
    """How many tasks the gateway's event loop has."""

    async def count() -> int:
        return len(asyncio.all_tasks())

    return asyncio.run_coroutine_threadsafe(count(), gateway.loop).result()


class Silent:
    """A stream of which the test pushes the deltas."""

    def abort_sample(self, index: int) -> None:
        """Nothing runs."""

    async def close(self) -> None:
        """Nothing runs."""


def test_open_stream_takes_one_task(tiny_qwen3_vl: Path) -> None:  # F14
    sinks: list[Sink] = []

    def generate(request: EngineRequest, sink: Sink, _: object) -> Silent:
        sinks.append(sink)
        return Silent()

    with scripted.running(tiny_qwen3_vl) as gateway:
        gateway.worker.generate = generate  # type: ignore[method-assign, assignment]
        num_tasks = tasks(gateway)
        with ExitStack() as connections:
            for _ in range(20):
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", gateway.port)))
                send(connection, body("hi", stream=True))
            wait_until(lambda: len(sinks) == 20)
            wait_until(lambda: tasks(gateway) == num_tasks + 20)
            for sink in sinks:
                gateway.loop.call_soon_threadsafe(sink.delta, TOKEN)
            assert b"200 OK" in connection.recv(1 << 16)
            wait_until(lambda: tasks(gateway) == num_tasks + 20)
        wait_until(lambda: tasks(gateway) == num_tasks)


@table("stage", ["body", "fetch", "place", "decode", "prepared", "first_token", "stream"])
def test_disconnected_client_gives_everything_back(tiny_qwen3_vl: Path, stage: str) -> None:
    with held(tiny_qwen3_vl, stage) as connection:
        connection.close()


TIMES = {
    "body": GatewayConfig(connections=ConnectionLimits(body_seconds=0.3, sweep_seconds=0.1)),
    "fetch": GatewayConfig(fetch=FetchConfig(timeout_seconds=0.3)),
    "place": GatewayConfig(dispatch=DispatchLimits(wait_seconds=0.3)),
}


@pytest.mark.parametrize("stage", TIMES)
def test_timeout_gives_everything_back(tiny_qwen3_vl: Path, stage: str) -> None:
    with held(tiny_qwen3_vl, stage, TIMES[stage]) as connection:
        assert received(connection)[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 5")


@pytest.mark.parametrize("stage", ["first_token", "stream"])
def test_failed_worker_gives_everything_back(tiny_qwen3_vl: Path, stage: str) -> None:
    with held(tiny_qwen3_vl, stage, waiting=(0.3, WorkerFailed("it died"))) as connection:
        assert b"worker_failed" in received(connection)


async def test_a_request_without_images_does_not_wait_for_pixels() -> None:
    config = GatewayConfig()
    with Request.begin_request(Limits.of_config(config), Account(EVERYBODY), client=None) as request:
        with await request.pixels(2 * config.max_pixel_bytes), await asyncio.wait_for(request.pixels(0), 30):
            assert request.limits.pixels.weight == 2 * config.max_pixel_bytes
        assert request.limits.pixels.weight == 0
