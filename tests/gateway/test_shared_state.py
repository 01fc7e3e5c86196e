"""What requests share survives a fault of one of them: counts go back to 0, and other tenants get the same answers.

A fault strikes at each wait of a request, and of the tasks that it begins: its client leaves, its task is cancelled, an
error or a deadline comes out of what it waits for, or the decode processes are killed. docs/contracts.md lists what is
shared.
"""

import asyncio
import base64
import contextlib
import http.client
import http.server
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import injection
import msgspec
import pytest
import scripted
from chats import data_url, random_image
from clips import clip
from images import png
from pdfs import pdf
from tables import table
from waiting import wait_until

from saccade.gateway.config import GatewayConfig
from saccade.protocol.output import FinishReason, TokenDelta

KEY, OTHER_KEY = "one", "two"
QUESTION = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
PNG = png(64, 48, bytes(48 * (1 + 3 * 64)))
IMAGE = {"type": "image_url", "image_url": {"url": data_url(random_image(64, 96, 1))}}
CHAT = {"messages": [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}]}


def encoded(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


PDF = {"type": "file", "file": {"filename": "a.pdf", "file_data": encoded("application/pdf", pdf(b"", b""))}}
VIDEO = {"type": "video_url", "video_url": {"url": encoded("video/mp4", clip(num_frames=4))}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
MAX_WAITS = 400
"""More than any of the requests has."""

Fields = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of request: its path, and its body for a number, which makes it unlike others where they share work."""

    path: str
    body: Callable[[int, str], Fields | bytes]
    type: str = "application/json"


def form(number: int) -> bytes:
    """An upload of an image."""
    fields = [("purpose", "", b"vision"), ("file", f'; filename="{number}.png"', PNG)]
    parts = (
        f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"
        for name, more, content in fields
    )
    return b"".join(parts) + b"--x--\r\n"


def asked_of(part: Fields) -> Fields:
    return {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]}


def schema_of(number: int) -> Fields:
    return {"type": "json_schema", "json_schema": {"schema": {"type": "string", "maxLength": number + 1}}}


KINDS = {
    "streamed answers with an image": Kind("/v1/chat/completions", lambda n, web: {**CHAT, "stream": True, "n": 2}),
    "a fetched image": Kind(
        "/v1/chat/completions",
        lambda n, web: {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"{web}/{n % 2}"}}] * 2}
            ]
        },
    ),
    "a PDF": Kind("/v1/chat/completions", lambda n, web: asked_of(PDF)),
    "a video": Kind("/v1/chat/completions", lambda n, web: asked_of(VIDEO)),
    "tools": Kind("/v1/chat/completions", lambda n, web: {"messages": [QUESTION], "tools": [TOOL]}),
    "a schema": Kind(
        "/v1/chat/completions", lambda n, web: {"messages": [QUESTION], "response_format": schema_of(n), "stream": True}
    ),
    "a chat that is rendered in a thread": Kind(
        "/v1/chat/completions", lambda n, web: {"messages": [QUESTION], "chat_template": TEMPLATE}
    ),
    "a kept response": Kind("/v1/responses", lambda n, web: {"input": "hi", "stream": True}),
    "a message": Kind("/v1/messages", lambda n, web: {"messages": [QUESTION], "max_tokens": 9}),
    "several prompts": Kind("/v1/completions", lambda n, web: {"prompt": ["a", "b"], "n": 2, "stream": True}),
    "a count of tokens": Kind("/tokenize", lambda n, web: dict(CHAT)),
    "an upload": Kind("/v1/files", lambda n, web: form(n), "multipart/form-data; boundary=x"),
}


def leave(gateway: scripted.Gateway, task: asyncio.Task[Any], connection: Any) -> None:
    """The client leaves."""
    connection.transport.abort()


def cancel(gateway: scripted.Gateway, task: asyncio.Task[Any], connection: Any) -> None:
    """The request's task is cancelled."""
    task.cancel()


def fail(gateway: scripted.Gateway, task: asyncio.Task[Any], connection: Any) -> BaseException:
    return RuntimeError("injected")


def expire(gateway: scripted.Gateway, task: asyncio.Task[Any], connection: Any) -> BaseException:
    return TimeoutError()


def kill(gateway: scripted.Gateway, task: asyncio.Task[Any], connection: Any) -> None:
    """The decode processes are killed."""
    for pid in gateway.worker.pool.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


STRIKES: dict[str, Any] = {"leave": leave, "cancel": cancel, "fail": fail, "expire": expire, "kill": kill}
DECODING = ("streamed answers with an image", "a fetched image", "a PDF", "a video")


class Images(http.server.BaseHTTPRequestHandler):
    """Serves an image that must not be stored."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Length", str(len(PNG)))
        self.end_headers()
        self.wfile.write(PNG)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """The address of a server with images."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Images) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


CONFIG = GatewayConfig(api_keys=(KEY, OTHER_KEY), mm_processor_cache_gb=0, trusts_request_templates=True)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[scripted.Gateway]:
    config = replace(CONFIG, fetch=replace(CONFIG.fetch, allowed_networks=("127.0.0.1/32",)))
    with scripted.running(folder, config) as gateway:
        worker = gateway.worker
        assert worker.state.description is not None
        worker.become(description=msgspec.structs.replace(worker.state.description, takes_grammars=True))
        # The second answer is read only if it was asked for.
        worker.script = [
            TokenDelta("r", [300 + place], FinishReason.LENGTH if place == 1 else None, index=index)
            for index in range(2)
            for place in range(2)
        ]
        yield gateway


@pytest.fixture(scope="module")
def shared(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    with serving(tiny_qwen3_vl) as gateway:
        yield gateway


def answers(gateway: scripted.Gateway, kind: Kind, number: int, web: str) -> list[Any]:
    """What another tenant gets, without ids and times, and what the worker is asked for it."""
    gateway.worker.requests.clear()
    body = kind.body(number, web)
    found = gateway.ask("POST", kind.path, body, Authorization=f"Bearer {OTHER_KEY}", Content_Type=kind.type)
    assert found.status == 200, found.body
    sent = [msgspec.structs.replace(one, request_id="", salt=b"", media=[]) for one in gateway.worker.requests]
    return [found.status, len(found.body), sent, gateway.worker.pixels]


def send(gateway: scripted.Gateway, kind: Kind, number: int, web: str, fault: str) -> None:
    """Send a request that a fault ends; its answer is anything, or nothing."""
    body = kind.body(number, web)
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    headers = {"Content-Type": kind.type, "Authorization": f"Bearer {KEY}", "X-Fault": fault}
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        half = len(raw) // 2
        connection.request("POST", kind.path, raw[:half], headers | {"Content-Length": str(len(raw))})
        time.sleep(0.005)  # The server begins to wait for the rest.
        connection.send(raw[half:])
        connection.getresponse().read()


def open_things(gateway: scripted.Gateway, num_tasks: int) -> Fields:
    """The counts that are not 0."""
    limits, pool = gateway.application.limits, gateway.worker.pool
    router = gateway.application.routing.cache_view.router
    counts = {
        "requests": limits.admission.num_requests,
        "bytes": limits.memory.num_bytes,
        "bytes of pixels": limits.pixels.weight,
        "requests that wait for a worker": gateway.metric("saccade_router_queue_pending_requests"),
        "requests at workers": sum(work.num_requests for work in router.works().values()),
        "slots": gateway.metric("saccade_slots_in_use"),
        "images in decode processes": pool.queue.num_running,
        "images that wait for one": pool.queue.num_waiting,
        "connections": gateway.connections.num_open,
        "tasks": tasks(gateway) - num_tasks,
    }
    return {name: count for name, count in counts.items() if count}


def tasks(gateway: scripted.Gateway) -> int:
    """How many tasks the gateway's event loop has."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), gateway.loop).result()


@pytest.mark.ci
@table(
    ("kind", "strike"),
    [(kind, strike) for kind in KINDS for strike in STRIKES if strike != "kill" or kind in DECODING],
)
def test_a_fault_at_each_wait(kind: str, strike: str, shared: scripted.Gateway, web: str) -> None:
    expected = answers(shared, KINDS[kind], 0, web)
    wait_until(lambda: not shared.connections.num_open)
    num_tasks = tasks(shared)
    with injection.injected(shared) as faults:
        for place in range(MAX_WAITS):
            fault = faults["it"] = injection.Fault(place, partial(STRIKES[strike], shared))
            send(shared, KINDS[kind], place + 1, web, "it")
            assert fault.has_ended.wait(60)
            wait_until(lambda: not open_things(shared, num_tasks))
            if not fault.has_struck:
                break
        assert 0 < place < MAX_WAITS - 1
    assert answers(shared, KINDS[kind], 0, web) == expected
