"""Writes the answers to POST /v1/messages, Anthropic's API."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec
from msgspec import Raw

from saccade.errors import SaccadeError
from saccade.gateway.apis.messages.wire import (
    AnswerBlock,
    MessageAnswer,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    usage_of,
)
from saccade.gateway.json_parts import Part
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.call_reader import GeneratedCall, joined_calls
from saccade.gateway.output.choice import TOOL_CALLS, AnswerChunk, GeneratedChoice
from saccade.gateway.server.errors import encode_messages_error
from saccade.gateway.server.events import named_event, typed_event
from saccade.models.tool_formats.json_pieces import complete_object
from saccade.protocol.output import FinishReason

Increment = ThinkingBlock | TextBlock | GeneratedCall


class MessageObject:
    """Writes a `message` object."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._pieces: list[Increment] = []
        self.num_kept_bytes = 0

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Keep *chunk*, and return no events, because the answer is sent whole."""
        self._pieces += _pieces(chunk)
        self.num_kept_bytes += chunk.num_bytes
        return b""

    async def end_answer(self) -> list[Part]:
        """Return the object as JSON."""
        answer = self._answer
        return [msgspec.json.encode(_message(answer, _joined(self._pieces), *_stop(answer.choices[0])))]


class MessageEvents:
    """Writes events: the message's start, each block from start to stop, and the stop reason.

    Only one block is open at a time.
    """

    num_kept_bytes = 0

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._beginning: bytes | None = None
        self._index = -1
        self._open: type[AnswerBlock] | None = None

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Return the events for *chunk*; there are none if it has neither text nor calls."""
        if self._beginning is None:
            # Not earlier: only the first delta says how much of the prompt was in the cache.
            self._beginning = typed_event("message_start", message=_message(self._answer, [], None, None))
        return self._after_beginning(self._blocks(chunk))

    async def end_answer(self) -> list[Part]:
        """Return the events that end the open block and the message."""
        reason, sequence = _stop(self._answer.choices[0])
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        last = typed_event("message_delta", delta=stop, usage=usage_of(self._answer.usage))
        return [self._after_beginning(self._stop_block() + last + typed_event("message_stop"))]

    def _after_beginning(self, events: bytes) -> bytes:
        if not events or not self._beginning:
            return events
        events, self._beginning = self._beginning + events, b""
        return events

    def _blocks(self, chunk: AnswerChunk) -> bytes:
        events = b""
        for piece in _pieces(chunk):
            match piece:
                case ThinkingBlock(thinking):
                    events += self._in(ThinkingBlock("")) + self._delta("thinking", thinking=thinking)
                case TextBlock(text):
                    events += self._in(TextBlock("")) + self._delta("text", text=text)
                case GeneratedCall():
                    events += self._call(piece)
        return events

    def _call(self, call: GeneratedCall) -> bytes:
        """Return the events for *call*, or for a piece of it."""
        begin = self._stop_block() + self._in(ToolUseBlock(call.id, call.name, Raw(b"{}"))) if call.begins else b""
        return begin + (self._delta("input_json", partial_json=call.arguments) if call.arguments else b"")

    def _delta(self, kind: str, **increment: str) -> bytes:
        """Return the event that adds an *increment* to the open block."""
        return typed_event("content_block_delta", index=self._index, delta={"type": f"{kind}_delta", **increment})

    def _stop_block(self) -> bytes:
        """Return the event that ends the open block, or b"" if no block is open."""
        if self._open is None:
            return b""
        self._open = None
        return typed_event("content_block_stop", index=self._index)

    def _in(self, block: AnswerBlock) -> bytes:
        """End the open block and begin *block*; return the events. If a block of its type is open, do nothing."""
        if self._open is type(block):
            return b""
        end = self._stop_block()
        self._index += 1
        self._open = type(block)
        return end + typed_event("content_block_start", index=self._index, content_block=block)


def write_failure(error: SaccadeError) -> bytes:
    """Return *error* as the last event of a stream."""
    return named_event("error", encode_messages_error(error))


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
    """Return why *choice* ended, and the stop sequence that ended it, if any."""
    if choice.finish_reason == TOOL_CALLS:
        return "tool_use", None
    if choice.stop is not None:
        return "stop_sequence", choice.stop
    return ("max_tokens" if choice.finish_reason == FinishReason.LENGTH.value else "end_turn"), None


def _pieces(chunk: AnswerChunk) -> Iterator[Increment]:
    """Yield the increments in *chunk*."""
    if chunk.reasoning:
        yield ThinkingBlock(chunk.reasoning)
    for part in chunk.parts():
        yield TextBlock(part) if isinstance(part, str) else part


def _joined(pieces: Iterable[Increment]) -> list[AnswerBlock]:
    """Return *pieces* joined into blocks, in the same order as in a stream."""
    blocks: list[AnswerBlock] = []
    for kind, alike in groupby(pieces, type):
        if kind is ThinkingBlock:
            blocks.append(ThinkingBlock("".join(piece.thinking for piece in alike if isinstance(piece, ThinkingBlock))))
        elif kind is TextBlock:
            blocks.append(TextBlock("".join(piece.text for piece in alike if isinstance(piece, TextBlock))))
        else:
            calls = joined_calls(piece for piece in alike if isinstance(piece, GeneratedCall))
            blocks += [ToolUseBlock(call.id, call.name, _input(call)) for call in calls]
    return blocks


def _input(call: GeneratedCall) -> Raw:
    """Return the arguments of *call*.

    If the call is cut off, return only the arguments that are complete, as clients of a stream would.
    """
    return Raw((complete_object(call.arguments) if call.is_cut else call.arguments).encode())
