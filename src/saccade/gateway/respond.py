"""Stream to chunks: detokenize, stop, usage.

An answer is sent whole or as server-sent events; both read the same `Answer`. The headers wait for the first text, so
an error before it still has its own HTTP status; unless a ping, after a long silence, had to send them first.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple

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
    ChatRequest,
    Choice,
    ChunkChoice,
    CompletionTokensDetails,
    Delta,
    PromptTokensDetails,
    Usage,
)
from saccade.gateway.reasoning import Reasoning
from saccade.gateway.sampling import stop_strings
from saccade.gateway.served_model import ServedModel
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


class Text(NamedTuple):
    """What a delta adds to an answer, as text: its reasoning, then its content."""

    reasoning: str
    content: str


class Answer:
    """One answer as it grows: text, finish reason, usage, and the times of its tokens.

    *detokenizer* is that of the content, so that stop strings do not see the reasoning, which is *reasoning*'s affair
    where the model may think. begin() comes before the first delta.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        eos_token_ids: Sequence[int],
        metrics: Metrics,
        model: str,
        reasoning: Reasoning | None = None,
    ) -> None:
        self.finish_reason: str | None = None
        self.num_prompt_tokens = 0
        self._detokenizer = detokenizer
        self._reasoning = reasoning
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_cached_tokens = 0
        self._num_hidden_tokens = 0
        self._metrics = metrics
        self._model = model
        self._begun = self._last = time.perf_counter()
        self._has_tokens = False

    def begin(self, prompt: Sequence[int]) -> None:
        """Note the token ids of the prompt that is answered."""
        self.num_prompt_tokens = len(prompt)
        if self._reasoning is not None:
            self._reasoning.begin(prompt)

    async def texts(self, deltas: AsyncIterator[TokenDelta]) -> AsyncIterator[Text]:
        """Yield the text of each delta, "" included, until the answer is finished. Raises what the engine reports."""
        async for delta in deltas:
            yield self._take(delta)
            if self.finish_reason is not None:
                self._metrics.e2e_seconds.labels(self._model).observe(time.perf_counter() - self._begun)
                return
        raise WorkerFailed("The worker ended the answer without saying why.")

    @property
    def ends_in_reasoning(self) -> bool:
        """Whether the model is thinking still: there is no content."""
        return self._reasoning is not None and self._reasoning.is_open

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        reasoning = self._reasoning
        num_reasoning_tokens = reasoning.num_tokens if reasoning else 0
        num_markers = reasoning.num_markers if reasoning else 0
        num_content_tokens = self._detokenizer.num_tokens + self._num_hidden_tokens
        num_completion_tokens = num_reasoning_tokens + num_markers + num_content_tokens
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=self.num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning_tokens),
        )

    def _take(self, delta: TokenDelta) -> Text:
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
        text = self._read(shown, is_last=delta.finish_reason is not None)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
        if self._detokenizer.stopped:
            self.finish_reason = FinishReason.STOP.value
        else:
            self._num_hidden_tokens += len(delta.token_ids) - len(shown)
        return text

    def _read(self, token_ids: Sequence[int], is_last: bool) -> Text:
        reasoning = ""
        if self._reasoning is not None:
            reasoning, token_ids = self._reasoning.take(token_ids)
            reasoning += self._reasoning.finish() if is_last else ""
        content = self._detokenizer.push(token_ids)
        return Text(reasoning, content + self._detokenizer.finish() if is_last else content)

    def _observe(self, delta: TokenDelta) -> None:
        if delta.token_ids:
            now = time.perf_counter()
            histogram = self._metrics.itl_seconds if self._has_tokens else self._metrics.ttft_seconds
            histogram.labels(self._model).observe(now - self._last)
            self._has_tokens, self._last = True, now


def answer_to(request: ChatRequest, served: ServedModel, metrics: Metrics) -> Answer:
    """Return the answer to *request* before its first token; its clock starts now."""
    reasoning = None
    if served.reasoning is not None:
        reasoning = Reasoning(served.reasoning, served.tokenizer, shown=request.include_reasoning is not False)
    detokenizer = Detokenizer(served.tokenizer, stop_strings(request))
    return Answer(detokenizer, served.defaults.eos_token_ids, metrics, served.name, reasoning)


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
    texts = [text async for text in answer.texts(deltas)]
    reasoning = "".join(text.reasoning for text in texts)
    content = None if answer.ends_in_reasoning else "".join(text.content for text in texts)
    message = AnswerMessage(content, reasoning or UNSET)
    completion = ChatCompletion(
        id=chunk.id,
        created=chunk.created,
        model=chunk.model,
        choices=[Choice(message=message, finish_reason=answer.finish_reason or "")],
        usage=answer.usage,
    )
    await send_json(send, 200, msgspec.json.encode(completion))


async def send_stream(
    stream: EventStream, answer: Answer, deltas: AsyncIterator[TokenDelta], chunk: ChatCompletionChunk
) -> None:
    """Send the answer as chunks like *chunk*: role, text, finish reason, usage if *chunk* has room for it, [DONE]."""
    pending = _event(_with_delta(chunk, Delta(role="assistant", content="")))
    async for text in answer.texts(deltas):
        if events := _events(chunk, text, answer.finish_reason):
            await stream.write(pending + events)
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


def _events(chunk: ChatCompletionChunk, text: Text, finish_reason: str | None) -> bytes:
    """Return one event for reasoning and one for content, where there are; the last one has the finish reason."""
    events = b""
    if text.reasoning:
        events = _event(_with_delta(chunk, Delta(reasoning_content=text.reasoning)))
    if text.content or finish_reason is not None:
        delta = Delta(content=text.content) if text.content else Delta()
        events += _event(_with_delta(chunk, delta, finish_reason))
    return events


def _with_delta(chunk: ChatCompletionChunk, delta: Delta, finish_reason: str | None = None) -> ChatCompletionChunk:
    return msgspec.structs.replace(chunk, choices=[ChunkChoice(delta, finish_reason)])


def _event(chunk: ChatCompletionChunk) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
