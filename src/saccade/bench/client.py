"""A server as a client sees it: its model and version, and its answers with the time of every event."""

import dataclasses
import io
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from saccade.errors import StartupError
from saccade.transport.unreachable import why_unreachable

CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Less than any server's: a connection that a server has just closed would fail the next request."""

EXAMPLE_LENGTH = 300
START_IT = "Start it, or correct the URL."
NO_TEXT = "no text"
FAULTS: Mapping[type[Exception], tuple[str, str]] = {
    TimeoutError: ("timeout", "The answer did not end within --timeout."),
    aiohttp.ClientConnectorError: ("no connection", "The server does not accept connections."),
    aiohttp.ClientError: ("connection broken", "The server closed the connection before the answer ended."),
    msgspec.MsgspecError: ("no event stream", "An event of the answer is not JSON."),
    AttributeError: ("no event stream", "An event of the answer has not the form of a chat completion chunk."),
}


class Record(msgspec.Struct, frozen=True):
    """The record of one request. Times are in ms since it was sent.

    - started: seconds since the run began.
    - text_ms: when each event with text or reasoning came.
    - last_ms: when the last event of a choice came.
    - end_ms: when the answer ended.
    - cached_tokens: None if the server does not report them.
    - finish_reason: None if the answer did not end.
    - error: the kind of error, or None.
    - example: what the server answered, or what went wrong, if there was an error.
    """

    conversation: int
    turn: int
    started: float
    end_ms: float = 0.0
    text_ms: Sequence[float] = ()
    last_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    example: str | None = None


@dataclass
class AnswerReader:
    """Reads an event stream as it arrives."""

    text_ms: list[float] = field(default_factory=list)
    last_ms: float = 0.0
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    error: object = None
    is_done: bool = False
    _rest: bytes = b""

    def feed(self, content: bytes, now_ms: float) -> None:
        """Read bytes that arrived at *now_ms*. Raises MsgspecError or AttributeError if they are not chunks."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.is_done = True
            elif line.startswith(b"data:"):
                self._read(msgspec.json.decode(data), now_ms)

    def _read(self, event: dict[str, Any], now_ms: float) -> None:
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.last_ms = now_ms
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                self.text_ms.append(now_ms)
                self.texts.append(delta.get("content") or "")

    def fault(self) -> tuple[str, str] | None:
        """Return an ended answer's kind of error, and an example; None if it has no error."""
        if self.error is not None:
            return "error event", msgspec.json.encode(self.error).decode()
        if not self.is_done:
            return "stream broken off", "The answer ended without [DONE]."
        return None if self.text_ms else (NO_TEXT, "The answer has no text.")


@dataclass(frozen=True)
class Server:
    """A server at *url*, with or without /v1. *model* and *version* are "" if they are not known."""

    url: str
    session: aiohttp.ClientSession
    key: str = ""
    metrics_key: str = ""
    model: str = ""
    version: str = ""
    takes_ignore_eos: bool = True

    @property
    def root(self) -> str:
        """The URL without /v1, with a scheme."""
        url = self.url if "://" in self.url else f"http://{self.url}"
        return url.rstrip("/").removesuffix("/v1")

    def body(self, messages: Sequence[Mapping[str, object]], output_tokens: int) -> bytes:
        """Return the JSON of a chat completion request that streams."""
        fields = {"model": self.model, "messages": messages, "max_tokens": output_tokens, "temperature": 0}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(fields | ({"ignore_eos": True} if self.takes_ignore_eos else {}))

    async def ask(
        self, body: bytes, record: Record, is_over: Callable[[Sequence[str]], bool] = lambda _: False
    ) -> tuple[Record, str]:
        """Send *body*; return *record* with times, tokens and the error if there is one, and the answer's text.

        *is_over* gets the pieces of the text after each event; if it returns True, the rest is not read.
        """
        url, headers = f"{self.root}/v1/chat/completions", _headers(self.key) | {"content-type": "application/json"}
        reader, begin, fault = AnswerReader(), time.perf_counter(), None
        try:
            async with self.session.post(url, data=io.BytesIO(body), headers=headers) as response:
                if response.status != 200:
                    fault = f"HTTP {response.status}", await response.text(errors="replace")
                async for content in response.content.iter_any():
                    reader.feed(content, 1000 * (time.perf_counter() - begin))
                    if is_over(reader.texts):
                        break
        except tuple(FAULTS) as error:
            fault = self._words(error)
        end_ms = 1000 * (time.perf_counter() - begin)
        kind, example = fault or reader.fault() or (None, None)
        usage, details = reader.usage, reader.usage.get("prompt_tokens_details") or {}
        measured = Record(
            *(record.conversation, record.turn, record.started, end_ms, reader.text_ms, reader.last_ms),
            prompt_tokens=usage.get("prompt_tokens") or 0,
            completion_tokens=usage.get("completion_tokens") or len(reader.text_ms),
            cached_tokens=details.get("cached_tokens"),
            finish_reason=reader.finish_reason,
            error=kind,
            example=example and re.sub(r"[^\x20-\x7e\xa0-\uffff]+", " ", example)[:EXAMPLE_LENGTH],
        )
        return measured, "".join(reader.texts)

    async def post(self, path: str, body: bytes) -> tuple[int, str, str]:
        """Send *body*; return status, text and request id of the answer. Without an answer, 0 and what went wrong."""
        headers = _headers(self.key) | {"content-type": "application/json"}
        try:
            async with self.session.post(f"{self.root}{path}", data=io.BytesIO(body), headers=headers) as response:
                name = response.headers.get("x-request-id", "")
                return response.status, await response.text(errors="replace"), name
        except (TimeoutError, aiohttp.ClientError) as error:
            return 0, self._words(error)[1], ""

    def _words(self, error: Exception) -> tuple[str, str]:
        """Return the kind of *error*, one of FAULTS, and an example."""
        name, example = next(words for kind, words in FAULTS.items() if isinstance(error, kind))
        if isinstance(error, aiohttp.ClientConnectorError):
            example = why_unreachable(self.root, error, START_IT)
        return name, example

    async def metrics(self) -> str:
        """Return the text of /metrics, or "" if the server does not show it."""
        return await self._get("/metrics", self.metrics_key or self.key)

    async def has_batches(self) -> bool:
        """Return whether the server has /v1/batches."""
        return re.search(r'"object"\s*:\s*"list"', await self._get("/v1/batches?limit=1", self.key)) is not None

    async def _get(self, path: str, key: str) -> str:
        try:
            async with self.session.get(f"{self.root}{path}", headers=_headers(key)) as response:
                return await response.text(errors="replace") if response.status == 200 else ""
        except (TimeoutError, aiohttp.ClientError):
            return ""

    async def named(self) -> "Server":
        """Return the server with its model and version. Raises StartupError if it lists no model."""
        version = re.search(r'"version"\s*:\s*"([^"]+)"', await self._get("/version", self.key))
        listed = re.search(r'"id"\s*:\s*"([^"]+)"', await self._get("/v1/models", self.key))
        model = self.model or (listed[1] if listed else "")
        if not model:
            raise StartupError(await self._fault())
        return dataclasses.replace(self, model=model, version=version[1] if version else "")

    async def _fault(self) -> str:
        """Return why the server lists no model."""
        path = f"{self.root}/v1/models"
        try:
            async with self.session.get(path, headers=_headers(self.key)) as response:
                status = response.status
        except (TimeoutError, aiohttp.ClientError) as error:
            return why_unreachable(self.root, error, START_IT)
        if status == HTTPStatus.UNAUTHORIZED:
            return f"{path} answers 401: pass a key of the server as --api-key, or set SACCADE_API_KEY."
        return (
            f"{path} answers {status} and names no model. Is the URL right, and the server ready? --model gives a name."
        )

    async def explored(self) -> "Server":
        """Return the server as `named` does, and find out whether it takes ignore_eos. Raises StartupError."""
        server = await self.named()
        body = [{"role": "user", "content": "Hello"}]
        first, _ = await server.ask(server.body(body, 1), Record(0, 0, 0.0))
        if first.error in ("HTTP 400", "HTTP 422"):
            server = dataclasses.replace(server, takes_ignore_eos=False)
            first, _ = await server.ask(server.body(body, 1), Record(0, 0, 0.0))
        if first.error not in (None, NO_TEXT):
            raise StartupError(f"The first request to {self.root} failed: {first.error}. {first.example}")
        return server


def root_of(url: str) -> str:
    """Return the *url* of a server, which may end with /v1, without it and with a scheme."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def _headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def new_session(timeout: float) -> aiohttp.ClientSession:
    """Return a session that opens as many connections as there are requests; *timeout* is in seconds."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS),
    )
