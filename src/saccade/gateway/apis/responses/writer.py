"""POST /v1/responses: the writers of its answers, the endpoints of stored responses, and their store."""

import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from saccade.byte_lru import TenantLru
from saccade.errors import (
    InvalidValue,
    PreviousResponseNotFound,
    RequestError,
    ResponseNotFound,
    SaccadeError,
    UnsupportedParameter,
)
from saccade.gateway.apis.chat_endpoint import Format, ReadBody
from saccade.gateway.apis.responses.call_events import CallEvents
from saccade.gateway.apis.responses.reader import ReadResponse, parse_response, read_conversation
from saccade.gateway.apis.responses.tools import DeclaredTools
from saccade.gateway.apis.responses.wire import (
    DeletedResponse,
    IncompleteDetails,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningConfig,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseRequest,
    Status,
    TextFormat,
    usage_of,
)
from saccade.gateway.chat_request import CalledFunction, ChatMessage, ToolCall
from saccade.gateway.field_schemas import MAX_MESSAGES
from saccade.gateway.json_body import Body
from saccade.gateway.json_parts import Part
from saccade.gateway.memory_parts import MemoryPart
from saccade.gateway.output.answer import Answer
from saccade.gateway.output.call_reader import GeneratedCall
from saccade.gateway.output.choice import Chunk
from saccade.gateway.server.errors import ErrorAnswer, encode_error
from saccade.gateway.server.event_stream import typed_event
from saccade.gateway.tenants.account import ACCOUNT
from saccade.protocol.output import FinishReason

ENTRY_BYTES = 1024
"""Memory of a response besides its messages and its JSON."""

LARGEST_PART = 4
"""A conversation over this fraction of the store is not stored: it would displace many others."""


@dataclass(frozen=True)
class StoredResponse:
    """The messages that a request and its answer added after the response *previous*; *body* is its JSON.

    Instructions are not among the messages: they apply to one request only.
    """

    previous: str | None
    messages: tuple[ChatMessage, ...]
    body: bytes


def num_message_bytes(messages: Iterable[ChatMessage]) -> int:
    """Return the memory of *messages* in bytes."""
    return sum(map(_num_bytes, messages))


class ResponseStore:
    """Conversations that later requests can continue: responses of all tenants by id, *budget_bytes* together."""

    def __init__(self, budget_bytes: int) -> None:
        self._responses: TenantLru[str, StoredResponse] = TenantLru(budget_bytes)
        self.memory_part = MemoryPart("responses", budget_bytes, lambda: self._responses.num_bytes)

    def takes(self, num_bytes: int) -> bool:
        """Whether messages of *num_bytes* are small enough to store, with or without an answer."""
        return num_bytes + ENTRY_BYTES <= self._responses.budget_bytes // LARGEST_PART

    def put(self, tenant: bytes, response_id: str, response: StoredResponse) -> bool:
        """Store a complete response if it is small enough. Return whether it is stored."""
        num_bytes = len(response.body) + num_message_bytes(response.messages)
        if not self.takes(num_bytes):
            return False
        self._responses.put(tenant, response_id, response, num_bytes + ENTRY_BYTES)
        # The tenant with the most bytes may lose the response that it has just added.
        return response_id in self._responses.of(tenant)

    def body(self, tenant: bytes, response_id: str) -> bytes:
        """Return the JSON of a response. Raises ResponseNotFound."""
        return self._find(tenant, response_id).body

    def delete(self, tenant: bytes, response_id: str) -> None:
        """Delete a response; later ones of its conversation can no longer be continued. Raises ResponseNotFound."""
        self._find(tenant, response_id)
        self._responses.pop(tenant, response_id)

    def conversation(self, tenant: bytes, response_id: str) -> list[ChatMessage]:
        """Return all messages up to a response.

        Raises PreviousResponseNotFound, and InvalidValue for too many messages.
        """
        param = "previous_response_id"
        parts: list[tuple[ChatMessage, ...]] = []
        num_messages = 0
        previous: str | None = response_id
        while previous is not None:
            response = self._find(tenant, previous, PreviousResponseNotFound, param)
            parts.append(response.messages)
            num_messages += len(response.messages)
            if num_messages > MAX_MESSAGES or len(parts) > MAX_MESSAGES:
                raise InvalidValue(f"`{param}`: the conversation has more than {MAX_MESSAGES} messages.", param)
            previous = response.previous
        return [message for part in reversed(parts) for message in part]

    def _find(
        self,
        tenant: bytes,
        response_id: str,
        missing: type[RequestError] = ResponseNotFound,
        param: str = "response_id",
    ) -> StoredResponse:
        response = self._responses.of(tenant).get(response_id)
        if response is None:
            raise missing(
                f"`{param}`: this response is not kept here, or no longer; send the whole conversation as `input`.",
                param,
            )
        return response


def _num_bytes(value: object) -> int:
    """Return the memory of a message or a part of one, whatever its fields."""
    if isinstance(value, msgspec.Struct):
        inside = [item for item in msgspec.structs.astuple(value) if item is not None and item is not UNSET]
    else:
        inside = value if isinstance(value, list) else []
    return sys.getsizeof(value) + sum(map(_num_bytes, inside))


FUNCTION_FIELDS: Final = {"description": None, "parameters": None, "strict": None}
"""Fields that OpenAI repeats of each function."""

TOO_LARGE = "not stored: the conversation takes more than a quarter of --response-store-bytes"
"""The warning with an answer that cannot be continued by its id."""


@dataclass(frozen=True)
class Destination:
    """The *store* of a complete response, and the *messages* that its request adds after the response *previous*."""

    store: ResponseStore
    tenant: bytes
    previous: str | None
    messages: Sequence[ChatMessage]


@dataclass(frozen=True)
class Responses:
    """OpenAI's Responses. Without a *store* no response is stored."""

    strict_parameters: bool
    store: ResponseStore | None

    def read(self, body: Body, tenant: bytes) -> ReadBody:
        """Return the chat in *body*. Raises RequestError that names the field."""
        original, warning = parse_response(body, self.strict_parameters)

        def recall(response_id: str) -> list[ChatMessage]:
            return self._store("previous_response_id").conversation(tenant, response_id)

        read = read_conversation(original, recall)
        request, warning = read.chat, "; ".join(filter(None, (warning, read.warning)))
        is_continued = original.previous_response_id is not None
        num_recalled = num_message_bytes(request.messages[: read.num_known]) if is_continued else 0
        response_id = f"resp_{secrets.token_hex(16)}"
        unstored = _format(original, read, _unfinished(original, response_id, False))
        if self.store is None or original.store is False:
            return ReadBody(request, warning, [unstored], num_recalled_bytes=num_recalled)
        messages = request.messages[read.num_known :]
        num_bytes = num_message_bytes(messages)
        if not self.store.takes(num_bytes):
            warning = "; ".join(filter(None, (warning, TOO_LARGE)))
            return ReadBody(request, warning, [unstored], num_recalled_bytes=num_recalled)
        destination = Destination(self.store, tenant, original.previous_response_id, messages)
        stored = _format(original, read, _unfinished(original, response_id, True), destination)
        return ReadBody(request, warning, [stored], num_bytes, num_recalled)

    async def get(self, request: Request) -> HttpResponse:
        """GET /v1/responses/{response_id}."""
        body = self._store("response_id").body(request.scope[ACCOUNT].tenant.id, request.path_params["response_id"])
        return HttpResponse(body, media_type="application/json")

    async def delete(self, request: Request) -> HttpResponse:
        """DELETE /v1/responses/{response_id}."""
        response_id = request.path_params["response_id"]
        self._store("response_id").delete(request.scope[ACCOUNT].tenant.id, response_id)
        return HttpResponse(msgspec.json.encode(DeletedResponse(response_id)), media_type="application/json")

    def _store(self, param: str) -> ResponseStore:
        if self.store is None:
            raise UnsupportedParameter(
                f"`{param}`: this gateway keeps no responses, because of --response-store-bytes 0 or of "
                "--gateway-processes over 1; send the whole conversation as `input`.",
                param,
            )
        return self.store


def _format(
    original: ResponseRequest, read: ReadResponse, response: Response, destination: Destination | None = None
) -> Format:
    output = _Output(response, read.tools, destination, bool(original.stream))
    return Format(read.names, partial(ResponseWriter, output), output.failure)


class ResponseWriter:
    """Writes events: the response's beginning, each item from start to end, the complete response; or that alone."""

    def __init__(self, output: "_Output", answer: Answer) -> None:
        output.response = msgspec.structs.replace(output.response, model=answer.served.name)
        self._output = output
        self._answer = answer
        self._num_kept_bytes = 0

    def take(self, chunk: Chunk) -> bytes:
        """Return the events for *chunk*; the first chunk's follow those that begin every stream."""
        self._num_kept_bytes += chunk.num_bytes
        return self._output.beginning() + self._output.take(chunk)

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of the texts so far, which the last event or the whole response repeats."""
        return self._num_kept_bytes

    async def end(self) -> list[Part]:
        """Return the events that end the open item and the response, or the whole response."""
        status = _status(self._answer)
        events = self._output.beginning() + self._output.end(status)
        whole = self._output.whole(self._answer)
        return (
            [events, self._output.event(f"response.{status}", response=Raw(whole))] if self._output.streams else [whole]
        )


class _Output:
    """The growing items of one answer, and the events that report them. One item is open at a time.

    *response* is the object without its answer. Calls are those of *tools*. Unless the answer *streams*, no event is
    made.
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
        """Return the events that begin every stream, none if any event was returned before."""
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

    def whole(self, answer: Answer) -> bytes:
        """Return the complete response in JSON, and store it if there is room."""
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
            if not destination.store.put(
                destination.tenant, response.id, StoredResponse(destination.previous, messages, body)
            ):
                body = msgspec.json.encode(msgspec.structs.replace(response, store=False))
        return body

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event, nothing unless the answer streams."""
        if not self.streams:
            return b""
        number = self._num_events
        self._num_events += 1
        return typed_event(kind, sequence_number=number, **fields)

    def take(self, chunk: Chunk) -> bytes:
        """Return the events for *chunk*, none if it has no text and no call."""
        events = self._grow(ReasoningItem, "response.reasoning_text.delta", chunk.reasoning)
        for part in chunk.parts():
            if isinstance(part, str):
                events += self._grow(MessageItem, "response.output_text.delta", part, logprobs=[])
            else:
                events += (self.end("completed") if part.begins else b"") + self._call(part)
        return events

    def end(self, status: Status) -> bytes:
        """Return the events that end the open item, none if none is open."""
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
        events = b"" if self._open is kind else self.end("completed") + self._begin(kind)
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
        events, ended = self._call_events.take(call, f"{self._suffix}_{len(self._items)}", len(self._items))
        if ended is not None:
            item, whole = ended
            self._items.append(item)
            self._calls.append(ToolCall(whole.id, CalledFunction(whole.name, whole.arguments)))
        return b"".join(self.event(kind, **fields) for kind, fields in events)

    def _place(self) -> dict[str, Any]:
        prefix = "msg" if self._open is MessageItem else "rs"
        return {"item_id": f"{prefix}_{self._suffix}_{len(self._items)}", "output_index": len(self._items)}


def _unfinished(original: ResponseRequest, response_id: str, is_stored: bool) -> Response:
    """Return the response to the request *original* without its answer; it has no input."""
    reasoning, form = original.reasoning, None if original.text is None else original.text.format
    return Response(
        id=response_id,
        created_at=int(time.time()),
        model=original.model or "",
        status="in_progress",
        output=[],
        usage=None,
        error=None,
        incomplete_details=None,
        instructions=original.instructions,
        max_output_tokens=original.max_output_tokens,
        metadata=original.metadata or {},
        parallel_tool_calls=original.parallel_tool_calls is not False,
        previous_response_id=original.previous_response_id,
        reasoning=ReasoningConfig(*((None, None) if reasoning is None else (reasoning.effort, reasoning.summary))),
        store=is_stored,
        temperature=original.temperature,
        # Encoded now, since the schema is a view of the whole body.
        text=TextFormat(Raw(b'{"type":"text"}' if form is None else msgspec.json.encode(form))),
        tool_choice=original.tool_choice or "auto",
        tools=[tool if tool["type"] != "function" else {**FUNCTION_FIELDS, **tool} for tool in original.tools or ()],
        top_p=original.top_p,
    )


def _status(answer: Answer) -> Status:
    return "incomplete" if answer.choices[0].finish_reason == FinishReason.LENGTH.value else "completed"


def _as_message(items: list[OutputItem], calls: list[ToolCall]) -> ChatMessage:
    """Return the turn of *items* with *calls* as a message of a chat; it may be empty."""
    reasoning = "".join(item.content[0].text for item in items if isinstance(item, ReasoningItem))
    text = "".join(item.content[0].text for item in items if isinstance(item, MessageItem))
    return ChatMessage(role="assistant", content=text, reasoning_content=reasoning or None, tool_calls=calls or None)
