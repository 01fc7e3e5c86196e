"""Whole answers that nobody reads: each is counted once, and their connections keep a piece of it only."""

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import certificates
import pytest
import scripted
from starlette.types import Message, Receive, Scope, Send
from tables import table
from test_tls import client_context, settings
from waiting import wait_until

from saccade.errors import BodyTooLarge, QueueFull
from saccade.gateway.byte_budget import ByteBudget
from saccade.gateway.config import GatewayConfig
from saccade.gateway.server import answer_memory
from saccade.gateway.server.answer_memory import IS_COUNTED, PIECE_BYTES, AnswerMemory
from saccade.gateway.server.connection import UNSENT_BYTES
from saccade.protocol.output import FinishReason, TokenDelta, TokenLogprob

files = certificates.files
MEMORY_BYTES = 48 << 20
NUM_READERS = 30
TEXT = "x" * 1_100_000
IDS = [300] * 600_000


@pytest.fixture(scope="module", params=["plain", pytest.param("tls", marks=pytest.mark.ci)])
def served(request: pytest.FixtureRequest, tiny_qwen3_vl: Path) -> Iterator[scripted.Gateway]:
    """A gateway with room for a few long answers, and for the prompts that make them."""
    config, tls = GatewayConfig(max_request_memory_bytes=MEMORY_BYTES, memory_wait_seconds=0.2), None
    if request.param == "tls":
        made = request.getfixturevalue("files")
        config, tls = replace(config, tls=settings(made)), client_context(made)
    with scripted.running(tiny_qwen3_vl, config, tls=tls, max_model_len=1 << 22) as gateway:
        yield gateway


def uploaded(gateway: scripted.Gateway) -> str:
    """The path to a file of 3 MiB."""
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n%PDF-1.4\n'
    form += bytes(3 << 20) + b"\r\n--b--\r\n"
    answer = gateway.ask("POST", "/v1/files", form, Content_Type="multipart/form-data; boundary=b")
    return f"/v1/files/{answer.json['id']}/content"


def stored(gateway: scripted.Gateway) -> str:
    """The path to a response with instructions of over a MiB."""
    gateway.answer_two_tokens()
    answer = gateway.ask("POST", "/v1/responses", {"model": "tiny", "input": "hi", "instructions": TEXT})
    return f"/v1/responses/{answer.json['id']}"


def with_logprobs(gateway: scripted.Gateway) -> str:
    """The path for a chat, whose answer is long because of its log probabilities."""
    best = TokenLogprob(-1.0, 1, list(range(300, 320)), [-1.0] * 20)
    ids = [300] * 2000
    gateway.worker.script = [TokenDelta("r", ids, FinishReason.LENGTH, logprobs=[best] * len(ids))]
    return "/v1/chat/completions"


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20}
ANSWERS: dict[str, tuple[Any, dict[str, Any] | None, bool]] = {
    "file": (uploaded, None, True),
    "response": (stored, None, True),
    "tokens": (lambda _: "/tokenize", {"model": "tiny", "prompt": TEXT[:400_000]}, True),
    "text": (lambda _: "/detokenize", {"model": "tiny", "tokens": IDS}, True),
    "log probabilities": (with_logprobs, CHAT, False),
}
"""How an answer of over a MiB is made, the body that asks for it, and whether it is refused if there is no room.

What was generated is not refused.
"""


def reader(gateway: scripted.Gateway, path: str, body: dict[str, Any] | None) -> socket.socket:
    """A client that asks and reads no more than the status."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", gateway.port))
    connection = connection if gateway.tls is None else gateway.tls.wrap_socket(connection)
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    )
    connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    return connection


@pytest.mark.ci
@table("made", ANSWERS)
def test_answers_that_nobody_reads_are_counted_once(made: str, served: scripted.Gateway) -> None:
    make, body, is_refused = ANSWERS[made]
    path = make(served)
    memory = served.application.limits.memory
    wait_until(lambda: not memory.num_bytes)
    length = int(served.ask("GET" if body is None else "POST", path, body).headers["content-length"])
    assert length > 1 << 20
    with contextlib.ExitStack() as opened:
        statuses = []
        for _ in range(NUM_READERS):
            connection = opened.enter_context(reader(served, path, body))
            statuses.append(int(connection.recv(12).split()[1]))
        num_held = statuses.count(200)
        wait_until(lambda: memory.num_bytes == num_held * length)
        assert set(statuses) == ({200, 429} if is_refused else {200})
        assert not is_refused or memory.num_bytes <= memory.capacity_bytes / 2
        assert served.connections.num_unsent_bytes <= num_held * (UNSENT_BYTES + 2 * PIECE_BYTES)
        assert served.ask("GET", "/live").status == served.ask("GET", "/metrics").status == 200
    wait_until(lambda: not memory.num_bytes)
    assert served.ask("GET" if body is None else "POST", path, body).status == 200


def test_a_stream_that_nobody_reads_ends_its_work_and_says_so(tiny_qwen3_vl: Path) -> None:
    """Before, the worker went on, and all that it sent waited."""
    with scripted.running(tiny_qwen3_vl, GatewayConfig(max_request_memory_bytes=1 << 20)) as gateway:
        path = with_logprobs(gateway)
        (whole,) = gateway.worker.script
        assert isinstance(whole, TokenDelta)
        one = TokenDelta("r", whole.token_ids[:1], logprobs=whole.logprobs[:1])
        # The worker never ends by itself.
        gateway.worker.script = [*[one] * 4000, 600.0]
        with reader(gateway, path, {**CHAT, "stream": True}) as connection:
            wait_until(lambda: gateway.worker.num_aborted)
            memory = gateway.application.limits.memory
            assert memory.num_bytes <= 2 * memory.capacity_bytes
            received = b""
            while b"read too slowly" not in received[-4096:]:
                piece = connection.recv(1 << 16)
                assert piece
                received += piece
        wait_until(lambda: not memory.num_bytes)
        gateway.answer_two_tokens()
        assert gateway.chat().status == 200


GETS = {
    "/v1/models": 429,
    "/v1/models/tiny": 429,
    "/v1/files": 429,
    "/v1/files/{file}": 429,
    "/openapi.json": 429,
    "/": 429,
    "/docs": 429,
    "/metrics": 200,
    "/live": 200,
    "/ready": 200,
    "/health": 200,
    "/load": 200,
    "/version": 200,
    "/nothing": 404,
    "/v1/responses/none": 404,
}


@table("path", GETS)
def test_without_memory_only_long_answers_to_clients_are_refused(
    path: str, gateway: scripted.Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_memory, "PIECE_BYTES", 32)
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nvision\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.pdf"\r\n\r\n%PDF-1.4\n\r\n--b--\r\n'
    file = gateway.ask("POST", "/v1/files", form, Content_Type="multipart/form-data; boundary=b").json["id"]
    path = path.format(file=file)
    memory = gateway.application.limits.memory
    whole = gateway.ask("GET", path)
    with memory.reservation("another") as all_there_is:
        all_there_is.take_bytes(memory.capacity_bytes)
        answer = gateway.ask("GET", path)
        assert answer.status == GETS.get(path, 429)
        assert gateway.ask("HEAD", path).status == whole.status
    assert gateway.ask("GET", path).status == whole.status
    # What an answer held is given back after its last byte.
    wait_until(lambda: memory.num_bytes == gateway.application.limits.reserve.num_bytes == 0)


async def sent(app_messages: list[Message], budget: ByteBudget, scope: Scope) -> tuple[list[Message], list[int]]:
    """What goes to the connection, and the bytes counted at each message."""
    messages, counted = list[Message](), list[int]()

    async def app(_: Scope, __: Receive, send: Send) -> None:
        for message in app_messages:
            await send(message)

    async def send(message: Message) -> None:
        messages.append(message)
        counted.append(budget.num_bytes)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with contextlib.suppress(QueueFull, BodyTooLarge):
        await AnswerMemory(app, lambda _: budget.reservation("me"))(scope, receive, send)
    assert budget.num_bytes == 0
    return messages, counted


START: Message = {"type": "http.response.start", "status": 200, "headers": []}
LONG = bytes(range(256)) * (PIECE_BYTES * 2 // 256) + b"end"


def part(body: bytes, more_body: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


WHOLE = [START, part(LONG)]
STREAM = [START, part(LONG, True), part(LONG)]


@table(
    ("messages", "scope", "capacity_bytes", "num_counted"),
    [
        ([START, part(LONG[:PIECE_BYTES])], {}, 1, 0),
        ([START, part(b"")], {}, 1, 0),
        (WHOLE, {}, len(LONG), len(LONG)),
        (WHOLE, {IS_COUNTED: True}, 1, 0),
        (STREAM, {}, 1, 0),
    ],
)
async def test_answers_arrive_in_pieces_as_they_were(
    messages: list[Message], scope: dict[str, Any], capacity_bytes: int, num_counted: int
) -> None:
    passed, counted = await sent(messages, ByteBudget(capacity_bytes), {"method": "GET", **scope})
    assert passed[0] is START
    assert b"".join(one["body"] for one in passed[1:]) == b"".join(one["body"] for one in messages[1:])
    assert all(len(one["body"]) <= PIECE_BYTES for one in passed[1:])
    assert [one["more_body"] for one in passed[1:]] == [True] * (len(passed) - 2) + [False]
    assert set(counted) == {num_counted}


async def test_an_answer_without_room_is_not_begun() -> None:
    for capacity_bytes in (len(LONG) - 1, 1):
        assert await sent(WHOLE, ByteBudget(capacity_bytes), {"method": "GET"}) == ([], [])


async def test_an_answer_to_head_is_neither_cut_nor_counted() -> None:
    passed, counted = await sent(WHOLE, ByteBudget(1), {"method": "HEAD"})
    assert (passed, set(counted)) == (WHOLE, {0})
