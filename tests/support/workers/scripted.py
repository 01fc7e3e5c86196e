"""A real gateway on loopback whose only worker answers by a script."""

import asyncio
import http.client
import json
import logging
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import decode_servers
import model_trials
import msgspec
import openai
import structlog
import uvloop
from chats import openai_client
from stub_worker import StubWorker
from waiting import until, wait_until

from saccade.connectors.sink import Sink, Stream
from saccade.connectors.worker_state import WorkerState
from saccade.fleet.pool import WorkerPool
from saccade.gateway import app
from saccade.gateway.config import ConnectionLimits, GatewayConfig
from saccade.gateway.images.decode_pool.pool import DecodePool
from saccade.gateway.server.connections import Connections
from saccade.log_writer import LineWriter, LogOutput
from saccade.models.files import read_model_files
from saccade.protocol.description import Description
from saccade.protocol.exactness import Exactness
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.tokenization.tokenizer import Segment, Tokenizer
from saccade.transport import shared_memory

Step = TokenDelta | float | threading.Event | Exception
"""What a scripted worker does next: send a delta, wait some seconds or until the test says so, or raise."""

MAX_MODEL_LEN = 4096
START_SECONDS = 120
"""On a machine that is busy."""
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|tool_call>", "<tool_call|>", '<|"|>')
PINGS_OFTEN = GatewayConfig(ping_interval_seconds=0.05, connections=ConnectionLimits(sweep_seconds=0.05))
SILENT = Exactness("NONE", "a script says nothing of caches")

structlog.configure(logger_factory=structlog.ReturnLoggerFactory())  # its lines would only clutter the tests


@dataclass(eq=False)
class ScriptedWorker(StubWorker):
    """A worker that plays *script*. It keeps the *pixels* of the last request, and counts what was aborted."""

    pool: DecodePool | None = None
    script: list[Step] = field(default_factory=list)
    pixels: list[bytes] = field(default_factory=list)
    num_aborted: int = 0

    def __post_init__(self) -> None:
        self.play = self._play

    def generate(self, request: EngineRequest, sink: Sink, chat: object = None) -> Stream:
        """Play the script; the request's slots are read and given back at once, before a test sees the request."""
        slots = [item.slot for item in request.media if item.slot is not None]
        self.pixels = [shared_memory.read_slot(slot) for slot in slots]
        if self.pool is not None:
            self.pool.release(slot.name for slot in slots)
        return super().generate(request, sink, chat)

    async def _play(self, request: EngineRequest, _: Sink) -> AsyncGenerator[TokenDelta, None]:
        num_open = request.num_samples
        try:
            for step in self.script:
                if isinstance(step, float):
                    await asyncio.sleep(step)
                elif isinstance(step, threading.Event):
                    await until(step.is_set)
                elif isinstance(step, Exception):
                    raise step
                else:
                    num_open -= step.finish_reason is not None
                    yield step
        finally:
            self.num_aborted += num_open > 0


@dataclass
class Answer:
    """What came back over HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; [DONE] as it is."""
        data = [line[6:] for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


@dataclass
class Gateway:
    """A running gateway and its scripted worker."""

    port: int
    worker: ScriptedWorker
    worker_pool: WorkerPool
    application: app.Application
    server: Any
    loop: asyncio.AbstractEventLoop
    log: LogOutput
    log_file: Any
    tls: ssl.SSLContext | None = None
    uds: Path | None = None

    def connect(self) -> socket.socket:
        """A connection to the gateway."""
        if self.uds is None:
            plain = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        else:
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(20)
            plain.connect(str(self.uds))
        return plain if self.tls is None else self.tls.wrap_socket(plain)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send one request; *body* is sent as JSON unless it is bytes."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if raw is not None:
            given = {"Content-Type": "application/json", **given}
        connection = http.client.HTTPConnection("localhost")
        connection.sock = self.connect()
        try:
            connection.request(method, path, raw, given)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def chat(self, content: Any = "hi", **fields: Any) -> Answer:
        """Ask the scripted model."""
        messages = [{"role": "user", "content": content}]
        return self.ask("POST", "/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})

    def chat_as(self, key: str) -> Answer:
        """Ask the scripted model with an API key."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        return self.ask("POST", "/v1/chat/completions", body, Authorization=f"Bearer {key}")

    def client(self, **options: Any) -> openai.OpenAI:
        """An openai client that does not retry."""
        return openai_client(f"http://127.0.0.1:{self.port}", **options)

    @property
    def connections(self) -> Connections:
        """What counts the connections of clients."""
        made = self.server.config.http
        assert isinstance(made, Connections)
        return made

    @contextmanager
    def describing(self, **changes: Any) -> Iterator[None]:
        """Have the worker describe itself with *changes* during the block."""
        before = self.worker.state
        assert before.description is not None
        self.worker.become(description=msgspec.structs.replace(before.description, **changes))
        try:
            yield
        finally:
            self.worker.become(**vars(before))

    def answer_two_tokens(self) -> None:
        """Have the worker answer two tokens and stop."""
        self.worker.script = [TokenDelta("r", [300]), TokenDelta("r", [301, self.eos], FinishReason.STOP)]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the scripted model."""
        return self.application.model_registry.get("tiny").tokenizer

    def answer_pieces(self, *pieces: str, finish: FinishReason = FinishReason.STOP, num_cached_tokens: int = 0) -> int:
        """Have the worker answer *pieces*, of which TAGS are tokens, one by one; return the number of tokens."""
        ids = self.tokenizer.encode([Segment(piece, piece in TAGS) for piece in pieces])
        end = [self.eos] if finish is FinishReason.STOP else []
        first = TokenDelta("r", ids[:1], num_cached_tokens=num_cached_tokens)
        self.worker.script = [first, *(TokenDelta("r", [one]) for one in ids[1:]), TokenDelta("r", end, finish)]
        return len(ids) + len(end)

    def send_at_once(self) -> None:
        """Have the worker send its answer in one delta."""
        deltas = [step for step in self.worker.script if isinstance(step, TokenDelta)]
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        self.worker.script = [TokenDelta("r", token_ids, deltas[-1].finish_reason)]

    @property
    def eos(self) -> int:
        """The id that ends an answer."""
        assert self.worker.state.description is not None
        return int(json.loads(self.worker.state.description.files.files["generation_config.json"])["eos_token_id"][0])

    def lines(self, request_id: str) -> list[Any]:
        """What the log says of a request so far; of one that has just been answered, perhaps nothing yet."""
        self.log.writer.flush()
        descriptor = self.log_file.fileno()
        # Reading at a place leaves the writer its own.
        lines = os.pread(descriptor, os.fstat(descriptor).st_size, 0).splitlines()
        return [line for line in map(json.loads, lines) if line.get("request_id") == request_id]

    def line(self, request_id: str) -> Any:
        """The only line of a request, which the gateway writes after it has sent the answer."""
        (line,) = wait_until(lambda: self.lines(request_id))
        return line

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 where there is none."""
        return self.application.metrics.registry.get_sample_value(name, labels) or 0.0


def streamed(stream: bool) -> dict[str, Any]:
    """Fields of a request for a stream that ends with its usage, or for a whole answer, which has it anyway."""
    return {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})


def describe(folder: Path, max_model_len: int = MAX_MODEL_LEN) -> Description:
    """What a worker would say of the checkpoint in *folder*."""
    return Description(
        model="tiny",
        fingerprint=b"f" * 32,
        files=read_model_files(folder),
        max_model_len=max_model_len,
        max_num_seqs=8,
        block_size=16,
        num_blocks=64,
        dtype="float32",
        device="cpu",
        shm_namespace=shared_memory.namespace(),
        version="0",
        takes_thinking_budgets=True,
    )


@contextmanager
def running(
    folder: Path,
    config: GatewayConfig | None = None,
    described: bool = True,
    log: LogOutput | None = None,
    tls: ssl.SSLContext | None = None,
    max_model_len: int = MAX_MODEL_LEN,
) -> Iterator[Gateway]:
    """Run a gateway in a thread of its own until the block ends. It logs to a file, or to *log*.

    Its client connects with *tls*.
    """
    with serving(describe(folder, max_model_len) if described else None, config, log, tls) as gateway:
        yield gateway


@contextmanager
def serving(
    description: Description | None,
    config: GatewayConfig | None = None,
    log: LogOutput | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Gateway]:
    """As running(), for a worker with any *description*, None if it does not describe itself."""
    with tempfile.TemporaryFile() as log_file, model_trials.shared():
        log = log or LogOutput(LineWriter(log_file.fileno(), lambda _: b"{}\n"), logging.INFO, is_terminal=False)
        with _running(description, config or GatewayConfig(), log, log_file, tls) as gateway:
            yield gateway


@contextmanager
def _running(
    description: Description | None,
    config: GatewayConfig,
    log: LogOutput,
    log_file: Any,
    tls: ssl.SSLContext | None,
) -> Iterator[Gateway]:
    config = replace(config, num_decode_processes=1)
    started: list[Gateway] = []
    ready = threading.Event()

    async def serve() -> None:
        with decode_servers.shared():
            pool = DecodePool(config)
        await pool.start()
        worker_pool = WorkerPool((), pool.release)
        loop = asyncio.get_running_loop()
        worker = ScriptedWorker(
            "grpc://scripted:1",
            WorkerState(exactness=SILENT),
            on_change=lambda one: loop.call_soon_threadsafe(worker_pool.changed, one),
            pool=pool,
        )
        if description is not None:
            worker.become(description=description, ready=True)
        worker_pool.add(worker)
        listener = app.listen("127.0.0.1", 0) if config.uds is None else app.listen_unix(config.uds)
        application = app.create_app(config, worker_pool, pool, logs=log)
        await application.start()
        server = app.DrainingServer(application, config)
        port = listener.getsockname()[1] if config.uds is None else 0
        started.append(Gateway(port, worker, worker_pool, application, server, loop, log, log_file, tls, config.uds))
        ready.set()
        try:
            await server.serve([listener])
        finally:
            await application.close()
            await pool.close()

    # A gateway that does not start must not keep the tests' process.
    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    if not ready.wait(START_SECONDS):
        raise TimeoutError("the gateway did not start")
    gateway = started[0]
    try:
        while description is not None and gateway.ask("GET", "/ready").status != 200:
            threading.Event().wait(0.02)
        yield gateway
    finally:
        with suppress(RuntimeError):  # the loop of a test that stops its gateway is closed
            gateway.server.handle_exit(15, None)
            gateway.server.handle_exit(15, None)
        thread.join(20)
