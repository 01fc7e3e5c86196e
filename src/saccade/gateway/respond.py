"""Stream to chunks: detokenize, stop, usage.

An answer is sent whole or as server-sent events; both read the same `Answer`. The headers wait for the first text, so
an error before it still has its own HTTP status; unless a ping, after a long silence, had to send them first.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import msgspec
import structlog
from msgspec import UNSET
from starlette.types import Receive, Send

from saccade.errors import InternalError, SaccadeError, WorkerFailed, from_code
from saccade.gateway.border import UNFORESEEN, encode_error, send_json
from saccade.gateway.openai import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Choice,
    ChunkChoice,
    Delta,
    PromptTokensDetails,
    Usage,
)
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.telemetry import Metrics
from saccade.tokenization.detokenizer import Detokenizer

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

_logger = structlog.get_logger(__name__)


class Answer:
    """One answer as it grows: text, finish reason, usage, and the times of its tokens."""

    def __init__(self, detokenizer: Detokenizer, eos_token_ids: Sequence[int], metrics: Metrics, model: str) -> None:
        self.finish_reason: str | None = None
        self.num_prompt_tokens = 0
        self._detokenizer = detokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_cached_tokens = 0
        self._num_hidden_tokens = 0
        self._metrics = metrics
        self._model = model
        self._begun = self._last = time.perf_counter()
        self._has_tokens = False

    async def texts(self, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[str]:
        """Yield the text of each delta, "" included, until the answer is finished. Raises what the engine reports."""
        async for delta in deltas:
            yield self._take(delta)
            if self.finish_reason is not None:
                self._metrics.e2e_seconds.labels(self._model).observe(time.perf_counter() - self._begun)
                return
        raise WorkerFailed("The worker ended the answer without saying why.")

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        num_completion_tokens = self._detokenizer.num_tokens + self._num_hidden_tokens
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=self.num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
        )

    def _take(self, delta: TokenDelta) -> str:
        if delta.failure is not None:
            raise from_code(delta.failure.code, delta.failure.message, delta.failure.param)
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise WorkerFailed("The worker gave this request up.")
        self._observe(delta)
        self._num_cached_tokens += delta.num_cached_tokens
        shown = delta.token_ids
        # The id that ended the answer counts as generated and is not shown, special token or not.
        if delta.finish_reason is FinishReason.STOP and shown and shown[-1] in self._eos_token_ids:
            shown = shown[:-1]
        text = self._detokenizer.push(shown)
        if delta.finish_reason is not None:
            text += self._detokenizer.finish()
            self.finish_reason = delta.finish_reason.value
        if self._detokenizer.stopped:
            self.finish_reason = FinishReason.STOP.value
        else:
            self._num_hidden_tokens += len(delta.token_ids) - len(shown)
        return text

    def _observe(self, delta: TokenDelta) -> None:
        if delta.token_ids:
            now = time.perf_counter()
            histogram = self._metrics.itl_seconds if self._has_tokens else self._metrics.ttft_seconds
            histogram.labels(self._model).observe(now - self._last)
            self._has_tokens, self._last = True, now


class EventStream:
    """Server-sent events over raw ASGI: no layer between a token and the socket."""

    def __init__(self, send: Send, ping_interval_seconds: float) -> None:
        self._send = send
        self._ping_interval_seconds = ping_interval_seconds
        self._last = time.monotonic()
        self.started = False

    async def write(self, event: bytes, more: bool = True) -> None:
        """Send *event* as it is; the first one sends the headers too."""
        self._last = time.monotonic()
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        await self._send({"type": "http.response.body", "body": event, "more_body": more})

    async def keep_alive(self) -> None:
        """Send a comment after every silence, so that proxies keep the connection; for ever."""
        while True:
            silence = time.monotonic() - self._last
            if silence >= self._ping_interval_seconds:
                await self.write(PING)
                silence = 0.0
            await asyncio.sleep(self._ping_interval_seconds - silence)


async def send_whole(send: Send, answer: Answer, deltas: AsyncIterator[TokenDelta], chunk: ChatCompletionChunk) -> None:
    """Send the answer as one chat.completion object, with the id, time and model of *chunk*."""
    content = "".join([text async for text in answer.texts(deltas)])
    completion = ChatCompletion(
        id=chunk.id,
        created=chunk.created,
        model=chunk.model,
        choices=[Choice(message=AnswerMessage(content), finish_reason=answer.finish_reason or "")],
        usage=answer.usage,
    )
    await send_json(send, 200, msgspec.json.encode(completion))


async def send_stream(
    stream: EventStream, answer: Answer, deltas: AsyncIterator[TokenDelta], chunk: ChatCompletionChunk
) -> None:
    """Send the answer as chunks like *chunk*: role, text, finish reason, usage if *chunk* has room for it, [DONE]."""
    pending = _event(_with_delta(chunk, Delta(role="assistant", content="")))
    async for text in answer.texts(deltas):
        if text or answer.finish_reason is not None:
            delta = Delta(content=text) if text else Delta()
            await stream.write(pending + _event(_with_delta(chunk, delta, answer.finish_reason)))
            pending = b""
    last = b"" if chunk.usage is UNSET else _event(msgspec.structs.replace(chunk, usage=answer.usage))
    await stream.write(last + DONE, more=False)


async def report_errors(stream: EventStream, work: Coroutine[Any, Any, None]) -> None:
    """Run *work*; an error after the stream began becomes its last event, without [DONE]. An earlier one is raised."""
    try:
        await work
    except SaccadeError as error:
        failure = error
    except Exception:
        # The handler that answers with a status is out of reach once the stream began.
        if not stream.started:
            raise
        _logger.exception("unforeseen error in a stream")
        failure = InternalError(UNFORESEEN)
    else:
        return
    if not stream.started:
        raise failure
    await stream.write(b"data: " + encode_error(failure) + b"\n\n", more=False)


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]
) -> bool:
    """Run *work*, and *beside* as long; cancel all when the client leaves. Return whether *work* was done."""
    tasks = [asyncio.ensure_future(part) for part in (work, _disconnect(receive), *beside)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
    return not tasks[0].cancelled()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_delta(chunk: ChatCompletionChunk, delta: Delta, finish_reason: str | None = None) -> ChatCompletionChunk:
    return msgspec.structs.replace(chunk, choices=[ChunkChoice(delta, finish_reason)])


def _event(chunk: ChatCompletionChunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
