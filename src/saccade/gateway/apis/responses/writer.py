"""Writes the answers to POST /v1/responses."""

from typing import Any

import msgspec
from msgspec import Raw

from saccade.errors import (
    SaccadeError,
)
from saccade.gateway.apis.responses.call_events import CallEvents
from saccade.gateway.apis.responses.store import Destination, StoredResponse
from saccade.gateway.apis.responses.tools import DeclaredTools
from saccade.gateway.apis.responses.wire import (
    IncompleteDetails,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    Status,
    usage_of,
)
from saccade.gateway.chat_request import CalledFunction, ChatMessage, ToolCall
from saccade.gateway.json_parts import Part
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.call_reader import GeneratedCall
from saccade.gateway.output.choice import AnswerChunk
from saccade.gateway.server.errors import ErrorAnswer, encode_error
from saccade.gateway.server.events import typed_event
from saccade.protocol.output import FinishReason


class ResponseWriter:
    """Writes the complete response or, if the answer streams, events.

    The events report the response's start, and each item from start to end. The last one has the complete response.
    """

    def __init__(self, output: "ResponseOutput", answer: Answer) -> None:
        output.response = msgspec.structs.replace(output.response, model=answer.served.name)
        self._output = output
        self._answer = answer
        self._num_kept_bytes = 0

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Return the events for *chunk*. Before the first chunk's events come those that begin every stream."""
        self._num_kept_bytes += chunk.num_bytes
        return self._output.beginning() + self._output.take_chunk(chunk)

    @property
    def num_kept_bytes(self) -> int:
        """Size of the texts so far, in bytes; the last event or the whole response repeats them."""
        return self._num_kept_bytes

    async def end_answer(self) -> list[Part]:
        """Return the events that end the open item and the response, or the whole response."""
        status = _status(self._answer)
        events = self._output.beginning() + self._output.end_answer(status)
        whole = await self._output.whole(self._answer)
        return (
            [events, self._output.event(f"response.{status}", response=Raw(whole))] if self._output.streams else [whole]
        )


class ResponseOutput:
    """Collects the items of one answer, and makes the events that report them. Only one item is open at a time.

    *response* is the object without its answer. Calls refer to *tools*. Only an answer that *streams* has events.
    """

    def __init__(
        self, response: Response, tools: DeclaredTools, destination: Destination | None, streams: bool
    ) -> None:
        self.response = response
        self.streams = streams
        self._call_events = CallEvents(tools)
        self._destination = destination
        self._calls: list[ToolCall] = []

        self._items: list[OutputItem] = []
        """The complete items."""

        self._suffix = response.id.removeprefix("resp_")
        self._open: type[MessageItem | ReasoningItem] | None = None
        self._texts: list[str] = []
        self._num_events = 0

    def beginning(self) -> bytes:
        """Return the events that begin every stream, or nothing if an event has already been returned."""
        if self._num_events:
            return b""
        return self.event("response.created", response=self.response) + self.event(
            "response.in_progress", response=self.response
        )

    def failure(self, error: SaccadeError) -> bytes:
        """Return the last events of a stream that fails with *error*."""
        detail = msgspec.json.decode(encode_error(error), type=ErrorAnswer).error
        failed = msgspec.structs.replace(
            self.response, status="failed", output=self._items, error=ResponseError(detail.code, detail.message)
        )
        events = self.beginning() + self.event("error", code=detail.code, message=detail.message, param=detail.param)
        return events + self.event("response.failed", response=failed)

    async def whole(self, answer: Answer) -> bytes:
        """Return the complete response as JSON, and store it if there is room."""
        status = _status(answer)
        response = msgspec.structs.replace(
            self.response,
            status=status,
            output=self._items,
            usage=usage_of(answer.usage),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        )
        body = msgspec.json.encode(response)
        if self._destination is not None:
            destination = self._destination
            messages = (*destination.messages, _as_message(response.output, self._calls))
            if not await destination.store.put(
                destination.tenant, response.id, StoredResponse(destination.previous, messages, body)
            ):
                body = msgspec.json.encode(msgspec.structs.replace(response, store=False))
        return body

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event, or nothing if the answer does not stream."""
        if not self.streams:
            return b""
        number = self._num_events
        self._num_events += 1
        return typed_event(kind, sequence_number=number, **fields)

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Return the events for *chunk*; there are none if it has neither text nor calls."""
        events = self._grow(ReasoningItem, "response.reasoning_text.delta", chunk.reasoning)
        for part in chunk.parts():
            if isinstance(part, str):
                events += self._grow(MessageItem, "response.output_text.delta", part, logprobs=[])
            else:
                events += (self.end_answer("completed") if part.begins else b"") + self._call(part)
        return events

    def end_answer(self, status: Status) -> bytes:
        """End the open item, if there is one, and return the events that report it."""
        if self._open is None:
            return b""
        text, place = "".join(self._texts), self._place()
        item: OutputItem
        part: OutputText | ReasoningText
        if self._open is MessageItem:
            part = OutputText(text)
            item = MessageItem(place["item_id"], [part], status)
            events = self.event("response.output_text.done", **place, content_index=0, text=text, logprobs=[])
        else:
            part = ReasoningText(text)
            item = ReasoningItem(place["item_id"], [part], status)
            events = self.event("response.reasoning_text.done", **place, content_index=0, text=text)
        events += self.event("response.content_part.done", **place, content_index=0, part=part)
        events += self.event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return events

    def _grow(self, kind: type[MessageItem | ReasoningItem], event: str, text: str, **fields: Any) -> bytes:
        if not text:
            return b""
        events = b"" if self._open is kind else self.end_answer("completed") + self._begin(kind)
        self._texts.append(text)
        return events + self.event(event, **self._place(), content_index=0, delta=text, **fields)

    def _begin(self, kind: type[MessageItem | ReasoningItem]) -> bytes:
        self._open = kind
        self._texts = []
        place = self._place()
        item = kind(place["item_id"], [], "in_progress")
        part = OutputText("") if kind is MessageItem else ReasoningText("")
        return self.event("response.output_item.added", output_index=len(self._items), item=item) + self.event(
            "response.content_part.added", **place, content_index=0, part=part
        )

    def _call(self, call: GeneratedCall) -> bytes:
        events, ended = self._call_events.take_call(call, f"{self._suffix}_{len(self._items)}", len(self._items))
        if ended is not None:
            item, whole = ended
            self._items.append(item)
            self._calls.append(ToolCall(whole.id, CalledFunction(whole.name, whole.arguments)))
        return b"".join(self.event(kind, **fields) for kind, fields in events)

    def _place(self) -> dict[str, Any]:
        prefix = "msg" if self._open is MessageItem else "rs"
        return {"item_id": f"{prefix}_{self._suffix}_{len(self._items)}", "output_index": len(self._items)}


def _status(answer: Answer) -> Status:
    return "incomplete" if answer.choices[0].finish_reason == FinishReason.LENGTH.value else "completed"


def _as_message(items: list[OutputItem], calls: list[ToolCall]) -> ChatMessage:
    """Return the turn with *items* and *calls* as a chat message, which may be empty."""
    reasoning = "".join(item.content[0].text for item in items if isinstance(item, ReasoningItem))
    text = "".join(item.content[0].text for item in items if isinstance(item, MessageItem))
    return ChatMessage(role="assistant", content=text, reasoning_content=reasoning or None, tool_calls=calls or None)
