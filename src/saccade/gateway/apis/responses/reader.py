"""Reads the request bodies of POST /v1/responses."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from saccade.errors import (
    UnsupportedParameter,
)
from saccade.gateway.apis.chat_endpoint import Continuation, Format, ReadBody
from saccade.gateway.apis.responses.conversation import SPELLING, ReadResponse, read_conversation
from saccade.gateway.apis.responses.store import Destination, ResponseStore, num_message_bytes, required_store
from saccade.gateway.apis.responses.wire import (
    ReasoningConfig,
    Response,
    ResponseRequest,
    TextFormat,
)
from saccade.gateway.apis.responses.writer import ResponseOutput, ResponseWriter
from saccade.gateway.chat_request import ChatMessage
from saccade.gateway.known_parameters import CONSTRAINTS, NO_CONSTRAINT
from saccade.gateway.parameters import Body, ParameterReader

LATER: Final[dict[str, tuple[object, ...]]] = {
    "background": (False,),
    "conversation": (),
    "messages": ([],),
    "moderation": (),
    "prompt": (),
    "system": ("", []),
    **dict.fromkeys(CONSTRAINTS, NO_CONSTRAINT),
}
"""Unsupported parameters that would change the answer, with the values, besides null, that change nothing."""

WITHOUT_EFFECT: Final = frozenset(
    {
        "client_metadata",
        "context_management",
        "max_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "stream_options",
        "user",
    }
)
"""Parameters that change no answer; `max_tool_calls` is about tools that the server runs."""

SPELLINGS: Final = {
    **dict.fromkeys(CONSTRAINTS, SPELLING),
    "messages": "send them as `input`",
    "system": "send it as `instructions`",
}
LOGPROBS: Final = "message.output_text.logprobs"


_READER: Final = ParameterReader(ResponseRequest, later=LATER, without_effect=WITHOUT_EFFECT, spellings=SPELLINGS)
FUNCTION_FIELDS: Final = {"description": None, "parameters": None, "strict": None}
"""Fields that OpenAI repeats of each function."""

TOO_LARGE = "not stored: the conversation takes more than a quarter of --response-store-bytes"
AWAY = "not stored: the server's database does not answer"
"""Warnings with an answer that cannot be continued by its id."""


def parse_response(body: Body, strict: bool = False) -> tuple[ResponseRequest, str]:
    """Parse the *body* of POST /v1/responses; return the request, and a warning about ignored parameters.

    Raises BodyTooLarge, InvalidValue, and UnsupportedParameter for unsupported and, if *strict*, unknown parameters.
    """
    request, warning = _READER.read_parameters(body, strict)
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        param = "top_logprobs" if request.top_logprobs else "include"
        raise UnsupportedParameter(f"`{param}`: log probabilities are not served here; chats have them.", param)
    return request, warning


@dataclass(frozen=True)
class ResponseReader:
    """Reads bodies of POST /v1/responses. If *store* is None, no response is stored."""

    strict_parameters: bool
    store: ResponseStore | None

    def read_chat(self, body: Body, tenant: bytes) -> ReadBody | Continuation:
        """Return the chat in *body*, or how to read it if it continues a stored conversation. Raises RequestError."""
        original, warning = parse_response(body, self.strict_parameters)
        previous = original.previous_response_id
        if previous is None:
            return self._read(original, warning, tenant, ())
        store = required_store(self.store, "previous_response_id")
        return Continuation(
            partial(store.conversation, tenant, previous),
            lambda known, _: self._read(original, warning, tenant, known),
        )

    def _read(self, original: ResponseRequest, warning: str, tenant: bytes, known: Sequence[ChatMessage]) -> ReadBody:
        read = read_conversation(original, known)
        request, warning = read.chat, "; ".join(filter(None, (warning, read.warning)))
        is_continued = original.previous_response_id is not None
        num_recalled = num_message_bytes(request.messages[: read.num_known]) if is_continued else 0
        response_id = f"resp_{secrets.token_hex(16)}"
        unstored = _format(original, read, _unfinished(original, response_id, False))
        if self.store is None or original.store is False:
            return ReadBody(request, warning, [unstored], num_recalled_bytes=num_recalled)
        messages = request.messages[read.num_known :]
        num_bytes = num_message_bytes(messages)
        if remark := AWAY if self.store.is_away else "" if self.store.takes(num_bytes) else TOO_LARGE:
            warning = "; ".join(filter(None, (warning, remark)))
            return ReadBody(request, warning, [unstored], num_recalled_bytes=num_recalled)
        destination = Destination(self.store, tenant, original.previous_response_id, messages)
        stored = _format(original, read, _unfinished(original, response_id, True), destination)
        return ReadBody(request, warning, [stored], num_bytes, num_recalled)


def _format(
    original: ResponseRequest, read: ReadResponse, response: Response, destination: Destination | None = None
) -> Format:
    output = ResponseOutput(response, read.tools, destination, bool(original.stream))
    return Format(read.names, partial(ResponseWriter, output), output.failure)


def _unfinished(original: ResponseRequest, response_id: str, is_stored: bool) -> Response:
    """Return the response to *original*, still without an answer. It does not repeat the request's input."""
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
