"""POST /v1/messages, Anthropic's API: how its bodies are read and its answers written."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from saccade.errors import SaccadeError
from saccade.gateway.anthropic.answers import (
    AnswerBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageAnswer,
    MessageDelta,
    MessageStart,
    MessageStop,
    StopDelta,
    StopReason,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    event,
    usage_of,
)
from saccade.gateway.anthropic.chats import parse_messages
from saccade.gateway.api.answering import ReadBody
from saccade.gateway.generation.answer import Answer
from saccade.gateway.generation.choice import TOOL_CALLS, Chunk, GeneratedChoice
from saccade.gateway.generation.tool_calls.reader import GeneratedCall
from saccade.gateway.http.event_stream import EventStream
from saccade.gateway.http.middleware import encode_messages_error
from saccade.gateway.openai.field_names import FieldNames
from saccade.protocol.output import FinishReason, TokenDelta


@dataclass(frozen=True)
class Messages:
    """Anthropic's messages."""

    strict_parameters: bool

    def read(self, body: bytes | bytearray, tenant: bytes) -> ReadBody:
        """Return the chat in *body*. Raises RequestError that names the field."""
        request, warning, names = parse_messages(body, self.strict_parameters)
        return ReadBody(request, warning, MessageWriter(names))


@dataclass(frozen=True)
class MessageWriter:
    """Writes `message` objects and their events."""

    names: FieldNames

    async def whole(self, answer: Answer, deltas: AsyncIterator[TokenDelta]) -> bytes:
        """Return *answer* as one message, in JSON."""
        chunks = [chunk async for chunk in answer.chunks(deltas)]
        reasoning = "".join(chunk.reasoning for chunk in chunks)
        text = "".join(chunk.content for chunk in chunks)
        content: list[AnswerBlock] = [ThinkingBlock(reasoning)] if reasoning else []
        content += [TextBlock(text)] if text else []
        content += [_tool_use(call) for chunk in chunks for call in chunk.calls]
        return msgspec.json.encode(_message(answer, content, *_stop(answer.choices[0])))

    async def stream(self, stream: EventStream, answer: Answer, deltas: AsyncIterator[TokenDelta]) -> None:
        """Send *answer* as events: its beginning, each block from start to stop, why it ended."""
        blocks = _BlockEvents()
        pending = b""
        has_begun = False
        async for chunk in answer.chunks(deltas):
            if not has_begun:
                # Not earlier: only the first delta says how much of the prompt was found in the cache.
                pending = event(MessageStart(_message(answer, [], None, None)))
                has_begun = True
            if events := blocks.of(chunk):
                await stream.write(pending + events)
                pending = b""
        usage = usage_of(answer.usage)
        last = event(MessageDelta(StopDelta(*_stop(answer.choices[0])), usage)) + event(MessageStop())
        await stream.write(pending + blocks.end() + last, more=False)

    def failure(self, error: SaccadeError) -> bytes:
        """Return the event for *error*, the last one."""
        return b"event: error\ndata: " + encode_messages_error(error) + b"\n\n"


class _BlockEvents:
    """Events of the blocks of one answer, of which one is open at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[AnswerBlock] | None = None

    def of(self, chunk: Chunk) -> bytes:
        """Return the events for *chunk*, none where it has no text and no call."""
        events = b""
        if chunk.reasoning:
            events += self._in(ThinkingBlock(""))
            events += event(ContentBlockDelta(self._index, ThinkingDelta(chunk.reasoning)))
        if chunk.content:
            events += self._in(TextBlock(""))
            events += event(ContentBlockDelta(self._index, TextDelta(chunk.content)))
        for call in chunk.calls:
            events += self.end() + self._in(ToolUseBlock(call.id, call.name, Raw(b"{}")))
            events += event(ContentBlockDelta(self._index, InputJsonDelta(call.arguments)))
        return events

    def end(self) -> bytes:
        """Return the event that ends the open block, none where no block is open."""
        if self._open is None:
            return b""
        self._open = None
        return event(ContentBlockStop(self._index))

    def _in(self, block: AnswerBlock) -> bytes:
        """Return the events that begin *block*, none where one of its type is open."""
        if self._open is type(block):
            return b""
        end = self.end()
        self._index += 1
        self._open = type(block)
        return end + event(ContentBlockStart(self._index, block))


def _message(
    answer: Answer, content: list[AnswerBlock], stop_reason: StopReason | None, stop_sequence: str | None
) -> MessageAnswer:
    return MessageAnswer(
        id=answer.id.replace("chatcmpl-", "msg_"),
        model=answer.served.name,
        content=content,
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        usage=usage_of(answer.usage),
    )


def _stop(choice: GeneratedChoice) -> tuple[StopReason, str | None]:
    """Return why *choice* ended, and the stop sequence that ended it."""
    if choice.finish_reason == TOOL_CALLS:
        return "tool_use", None
    if choice.stop is not None:
        return "stop_sequence", choice.stop
    return ("max_tokens" if choice.finish_reason == FinishReason.LENGTH.value else "end_turn"), None


def _tool_use(call: GeneratedCall) -> ToolUseBlock:
    return ToolUseBlock(call.id, call.name, Raw(call.arguments.encode()))
