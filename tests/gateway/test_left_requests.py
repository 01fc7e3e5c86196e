"""A client that leaves takes its request with it: nothing of it waits for the garbage collector."""

import contextlib
import gc
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import scripted
from tables import table
from waiting import wait_until

from saccade.fleet.settings import DispatchLimits
from saccade.gateway.config import GatewayConfig
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob

MAX_NUM_SEQS = 6
"""As many samples as two prompts of three have."""
MESSAGES = [{"role": "user", "content": "hi"}]
MANY = {"n": 3, "logprobs": 2}
APIS: dict[str, tuple[str, dict[str, Any], int]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, 1),
    "chat, n": ("/v1/chat/completions", {"messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 2}, 3),
    "completions": ("/v1/completions", {"prompt": "hi"}, 1),
    "completions, n": ("/v1/completions", {"prompt": "hi", **MANY}, 3),
    "completions, prompts": ("/v1/completions", {"prompt": ["hi", "you"], **MANY}, 3),
    "messages": ("/v1/messages", {"messages": MESSAGES}, 1),
    "responses": ("/v1/responses", {"input": "hi"}, 1),
    "responses, not stored": ("/v1/responses", {"input": "hi", "store": False}, 1),
}
"""The path, the fields and the number of samples of a request of each API."""

LOGPROB = TokenLogprob(-1.0, 1, [300, 301], [-1.0, -2.0])


class Hold(threading.Event):
    """A step of a script that the worker never leaves; *is_reached* once it has come there."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = False

    def is_set(self) -> bool:
        self.is_reached = True
        return False


def tokens(num: int, num_samples: int, finish: FinishReason | None = None) -> list[scripted.Step]:
    """As many tokens of each sample."""
    steps = [TokenDelta("r", [300], finish, index=index, logprobs=[LOGPROB]) for index in range(num_samples)]
    return steps * num  # type: ignore[return-value]


def last(num_samples: int) -> list[scripted.Step]:
    return tokens(1, num_samples, FinishReason.LENGTH)


SCRIPTS: dict[str, Callable[[int], list[scripted.Step]]] = {
    "queued": lambda _: [Hold()],
    "before the first token": lambda _: [Hold()],
    "in the middle": lambda num: [*tokens(5, num), Hold()],
    "at the last": lambda num: [*tokens(5, num), *last(num)[1:], Hold()],
    "after the last": lambda num: [*tokens(5, num), *last(num)],
    "unread": lambda num: [*tokens(3900 // num, num), Hold()],
    "unread at the end": lambda num: [*tokens(3900 // num, num), *last(num)],
}
"""What the worker does for a request with so many samples until its client leaves."""


@pytest.fixture(scope="module")
def busy(tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway whose worker takes few requests; more are queued."""
    config = GatewayConfig(dispatch=DispatchLimits(lone_worker_queue=0))
    with scripted.running(tiny_qwen3_vl, config) as gateway:
        gateway.worker.become(
            description=msgspec.structs.replace(gateway.worker.state.description, max_num_seqs=MAX_NUM_SEQS)
        )
        yield gateway


def begin(gateway: scripted.Gateway, path: str, fields: dict[str, Any]) -> socket.socket:
    """A client that has sent its request, and reads nothing of the answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", gateway.port))
    body = json.dumps({"model": "tiny", "max_tokens": 4000, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return connection


def living() -> Counter[str]:
    """The objects of requests, by type, without stored responses, and lines of the log, which wait for their writer."""
    of_requests = ("saccade.gateway.", "saccade.protocol.", "uvicorn.protocols.")
    kinds = map(type, gc.get_objects())
    found = Counter(kind.__qualname__ for kind in kinds if kind.__module__.startswith(of_requests))
    return Counter({kind: num for kind, num in found.items() if kind not in ("RequestLine", "StoredResponse")})


def is_idle(gateway: scripted.Gateway) -> bool:
    limits = gateway.application.limits
    is_free = not limits.admission.num_requests and not limits.memory.num_bytes
    return is_free and not gateway.connections.num_open and not gateway.application.routing.dispatcher.num_waiting


def leave(gateway: scripted.Gateway, api: str, stage: str, stream: bool) -> None:
    """Begin a request, leave it at its *stage*, and wait until the gateway has nothing to do."""
    path, fields, num_samples = APIS[api]
    script = SCRIPTS[stage](num_samples)
    admission, dispatcher = gateway.application.limits.admission, gateway.application.routing.dispatcher
    num_prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
    with contextlib.ExitStack() as opened:
        gateway.worker.script = script
        if stage == "queued":
            for number in range(MAX_NUM_SEQS):
                opened.enter_context(begin(gateway, "/v1/completions", {"prompt": "hi"}))
                wait_until(lambda expected=number + 1: len(gateway.worker.requests) == expected)
        opened.enter_context(begin(gateway, path, {**fields, "stream": stream}))
        hold = script[-1]
        if stage == "queued":
            wait_until(lambda: dispatcher.num_waiting == num_prompts)
        elif isinstance(hold, Hold):
            wait_until(lambda: len(gateway.worker.requests) == num_prompts and hold.is_reached)
        else:
            wait_until(lambda: len(gateway.worker.requests) == num_prompts and not admission.num_requests)
    wait_until(lambda: is_idle(gateway))
    gateway.worker.requests.clear()
    gateway.worker.script = []


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@table("stage", SCRIPTS)
def test_nothing_of_a_stream_stays_when_its_client_leaves(stage: str, busy: scripted.Gateway) -> None:
    check_nothing_stays(busy, "chat, n", stage, stream=True)


@pytest.mark.ci
@table("stage", SCRIPTS)
@table("stream", [True, False])
@table("api", APIS)
def test_nothing_of_a_request_stays_when_its_client_leaves(
    api: str, stage: str, stream: bool, busy: scripted.Gateway
) -> None:
    check_nothing_stays(busy, api, stage, stream)


def check_nothing_stays(busy: scripted.Gateway, api: str, stage: str, stream: bool) -> None:
    leave(busy, api, stage, stream)  # makes what is made once
    with without_collector():
        before = living()
        leave(busy, api, stage, stream)
        # The last callbacks of the connection may still run.
        for _ in range(200):
            if not (stayed := living() - before):
                break
            time.sleep(0.01)
        assert not stayed
