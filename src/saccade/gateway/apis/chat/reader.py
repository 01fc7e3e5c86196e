"""Reads the request bodies of POST /v1/chat/completions."""

from typing import Final

import msgspec

from saccade.gateway.apis.chat.writer import ChatCompletionEvents, ChatCompletionObject
from saccade.gateway.apis.chat_endpoint import FieldNames, Format, ReadBody
from saccade.gateway.apis.text_files import with_text_files
from saccade.gateway.body_bounds import check_messages
from saccade.gateway.chat_request import ChatRequest
from saccade.gateway.parameters import Body, ParameterReader, check_stream
from saccade.gateway.server.events import error_event

_CHAT: Final = ParameterReader(ChatRequest)


def parse_chat(body: Body, strict: bool = False) -> tuple[ChatRequest, str]:
    """Parse *body*; return the chat request, and a warning about ignored parameters, or "" if there are none.

    Raises BodyTooLarge, InvalidValue, and UnsupportedParameter for unsupported and, if *strict*, unknown parameters.
    """
    request, warning = _CHAT.read_parameters(body, strict)
    check_stream(request)
    check_messages(request.messages)
    return msgspec.structs.replace(request, messages=with_text_files(request.messages)), warning


def read_chat_completion(strict: bool, body: Body, tenant: bytes) -> ReadBody:
    """Read the body of POST /v1/chat/completions. Once `partial` has bound *strict*, this function is a ReadApi."""
    request, warning = parse_chat(body, strict)
    writer = ChatCompletionEvents if request.stream else ChatCompletionObject
    return ReadBody(request, warning, [Format(FieldNames(), writer, error_event)])
