"""Fields of messages, parts, calls, items, blocks and tools that no API reads are named with their paths."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from anthropic import types as anthropic
from openai.types import chat as openai
from openai.types import responses
from tables import table

from saccade.errors import UnsupportedParameter
from saccade.gateway.apis.chat.reader import parse_chat
from saccade.gateway.apis.completions.reader import parse_completion
from saccade.gateway.apis.messages.reader import parse_count, parse_messages
from saccade.gateway.apis.models import parse_tokenize
from saccade.gateway.apis.responses.reader import parse_response

Read = Callable[..., tuple[Any, ...]]
URL = "data:image/png;base64,aGk="
TEXT = {"type": "text", "text": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CACHED = {"cache_control": {"type": "ephemeral"}}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aGk="}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {"odd": {"type": "string", "odd": 1}}}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "odd": 1}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts) or "hi", **fields}]}


def answered(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **fields}]}


def blocks(*parts: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": role, "content": list(parts) or "hi"}], **fields}


def items(*given: Any, **fields: Any) -> dict[str, Any]:
    return {"input": list(given) or "hi", **fields}


def parts(*given: Any) -> dict[str, Any]:
    return items({"role": "user", "content": list(given)})


def warning_of(read: Read, body: dict[str, Any]) -> str:
    return str(read(json.dumps(body).encode())[1])


C, M = "messages[0].content[0]", "messages[0].content[0].source"
NAMED: list[tuple[Read, dict[str, Any], str]] = [
    (parse_chat, chat(odd=1), "messages[0].odd"),
    (parse_chat, chat(TEXT | {"odd": 1}), f"{C}.odd"),
    (parse_chat, chat({"type": "image_url", "image_url": {"url": URL, "max_dynamic_patch": 1}}), f"{C}.image_url.max_dynamic_patch"),
    (parse_chat, chat({"type": "image_url", "image_url": URL, "fps": 1}), f"{C}.fps"),
    (parse_chat, chat({"type": "image_url", "image_url": URL, "text": "lost"}), f"{C}.text"),
    (parse_chat, chat(TEXT | {"max_pixels": 9}), f"{C}.max_pixels"),
    (parse_chat, chat({"type": "video_url", "video_url": {"url": "v", "video_start": 1}}), f"{C}.video_url.video_start"),
    (parse_chat, chat({"type": "image", "image": URL, "odd": 1}), f"{C}.odd"),
    (parse_chat, chat({"type": "file", "file": {"file_data": URL, "odd": 1}, "odd": 2}), f"{C}.file.odd, {C}.odd"),
    (parse_chat, answered(content="a", prefix=True), "messages[1].prefix"),
    (parse_chat, answered(tool_calls=[CALL | {"odd": 1}]), "messages[1].tool_calls[0].odd"),
    (parse_chat, answered(tool_calls=[CALL | {"function": {"name": "f", "arguments": "{}", "odd": 1}}]), "messages[1].tool_calls[0].function.odd"),
    (parse_chat, chat(TEXT, TEXT | {"a": 1, "b\n": 1}, c=1) | {"colour": 1}, "colour, messages[0].content[1].a, messages[0].content[1].b?, messages[0].c"),
    (parse_chat, chat(*[TEXT | {"odd": 1}] * 10), ", ".join(f"messages[0].content[{at}].odd" for at in range(8)) + " and 2 more"),
    (parse_chat, chat(**{"o" * 99: 1}), f"messages[0].{'o' * 61}..."),
    (parse_chat, chat({"type": "text", "text": 'say "data:a\\'}, odd=1), "messages[0].odd"),
    (parse_tokenize, chat(TEXT | {"odd": 1}), f"{C}.odd"),
    (parse_completion, {"prompt": "a", "stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
    (parse_messages, blocks(TEXT | {"odd": 1}), f"{C}.odd"),
    (parse_count, blocks(TEXT | {"odd": 1}), f"{C}.odd"),
    (parse_messages, blocks(system=[TEXT | {"odd": 1}]), "system[0].odd"),
    (parse_messages, {"max_tokens": 5, "messages": [{"role": "user", "content": "a", "odd": 1}]}, "messages[0].odd"),
    (parse_messages, blocks({"type": "image", "source": SOURCE | {"odd": 1}, "max_frames": 9}), f"{M}.odd, {C}.max_frames"),
    (parse_messages, blocks({"type": "tool_result", "tool_use_id": "c", "content": [TEXT | {"odd": 1}]}), f"{C}.content[0].odd"),
    (parse_messages, blocks({"type": "tool_use", "id": "c", "name": "f", "input": {"odd": 1}, "odd": 1}, role="assistant"), f"{C}.odd"),
    (parse_messages, blocks(tools=[TOOL | {"input_examples": [{}], "odd": 1}]), "tools[0].input_examples, tools[0].odd"),
    (parse_response, items({"role": "user", "content": "a", "odd": 1}), "input[0].odd"),
    (parse_response, parts({"type": "input_text", "text": "a", "odd": 1}), "input[0].content[0].odd"),
    (parse_response, parts({"type": "input_image", "image_url": URL, "fps": 1}), "input[0].content[0].fps"),
    (parse_response, items({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "odd": 1}), "input[0].odd"),
    (parse_response, items({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a", "odd": 1}]}), "input[0].output[0].odd"),
    (parse_response, items({"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}), "input[0].summary"),
    (parse_response, items(tools=[FUNCTION | {"odd": 1}]), "tools[0].odd"),
    (parse_response, items(tools=[{"type": "namespace", "name": "n", "tools": [FUNCTION | {"odd": 1}]}]), "tools[0].tools[0].odd"),
]  # fmt: skip


@table("read, body, named", NAMED)
def test_fields_that_are_not_read_are_named(read: Read, body: dict[str, Any], named: str) -> None:
    assert warning_of(read, body) == f"unknown parameters ignored: {named}"
    with pytest.raises(UnsupportedParameter) as raised:
        read(json.dumps(body).encode(), True)
    assert raised.value.param == named.split(", ")[0].split(" and ")[0]


ANSWER = openai.ChatCompletionMessage.model_validate(
    {"role": "assistant", "content": "a", "tool_calls": [CALL], "annotations": [], "reasoning_content": "Hm"}
)
BLOCKS = [{"type": "thinking", "thinking": "Hm", "signature": ""}, TEXT | {"citations": None}, {"type": "tool_use", "id": "c", "name": "f", "input": {"odd": 1}}]  # fmt: skip
MESSAGE = anthropic.Message.model_validate(
    {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": BLOCKS, "stop_reason": "tool_use",
     "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1}}
)  # fmt: skip
OUTPUT = [
    responses.ResponseReasoningItem.model_validate({"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}], "status": "completed"}),
    responses.ResponseOutputMessage.model_validate({"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]}),
    responses.ResponseFunctionToolCall.model_validate({"type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}),
]  # fmt: skip
PLAIN: list[tuple[Read, dict[str, Any]]] = [
    (parse_chat, answered(**ANSWER.model_dump() | {"role": "assistant"})),
    (parse_chat, chat(TEXT | CACHED | {"annotations": [], "id": "a", "index": 0}, id="m", status="completed", partial=True)),
    (parse_chat, chat({"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "a", **CACHED})),
    (parse_chat, chat({"type": "file", "file": {"file_data": URL, "filename": "a.png"}, **CACHED})),
    (parse_chat, answered(content=None, tool_calls=[CALL | {"index": 0}], odd=None, other=[], third={}, fourth="")),
    (parse_chat, chat() | {"tools": [{"type": "function", "function": {"name": "f", "odd": 1}}]}),
    (parse_messages, blocks(*[block.model_dump() for block in MESSAGE.content], role="assistant")),
    (parse_messages, {"max_tokens": 5, "messages": [MESSAGE.model_dump()]}),
    (parse_messages, blocks(TEXT | CACHED | {"citations": None}, system=[TEXT | CACHED])),
    (parse_messages, blocks({"type": "document", "source": SOURCE, "title": "a", "context": "b", "citations": {"enabled": True}, **CACHED})),
    (parse_messages, blocks(tools=[TOOL | CACHED | {"type": "custom", "eager_input_streaming": True, "defer_loading": True}])),
    (parse_messages, blocks({"type": "tool_result", "tool_use_id": "c", "content": "a", "is_error": False, **CACHED})),
    (parse_response, items(*[item.model_dump() for item in OUTPUT])),
    (parse_response, items(*[item.model_dump(exclude_none=True) for item in OUTPUT])),
    (parse_response, items({"type": "message", "role": "assistant", "phase": "commentary", "content": [{"type": "output_text", "text": "a", "annotations": [1], "logprobs": [1]}]})),
    (parse_response, items({"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"})),
    (parse_response, items({"type": "custom_tool_call", "id": "i", "status": "completed", "call_id": "c", "name": "f", "input": "a"})),
    (parse_response, parts({"type": "input_file", "file_data": URL, "filename": "a.png", "detail": "low"})),
    (parse_response, items(tools=[{"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION | {"defer_loading": True}]}, {"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}}])),
]  # fmt: skip


@table("read, body", PLAIN)
def test_ordinary_clients_get_no_warning(read: Read, body: dict[str, Any]) -> None:
    assert warning_of(read, body) == ""
    read(json.dumps(body).encode(), True)


LEFT_OUT: list[tuple[Read, dict[str, Any]]] = [
    (parse_messages, blocks({"type": "redacted_thinking", "data": "x"}, TEXT, role="assistant")),
    (parse_messages, blocks(tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}])),
    (parse_messages, blocks(context_management={"edits": [{"type": "compact_20260112", "trigger": {"type": "a"}}]})),
    (parse_response, items({"type": "web_search_call", "id": "w", "action": {"type": "search"}}, {"role": "user", "content": "a"})),
    (parse_response, items(tools=[{"type": "web_search", "search_context_size": "low"}])),
    # A nested declaration that the decoder just takes: what is in its depths is refused later.
    (parse_response, items(tools=[json.loads('{"type": "namespace", "tools": [' * 400 + "]}" * 400)])),
]  # fmt: skip


@table("read, body", LEFT_OUT)
def test_nothing_within_what_is_left_out_as_a_whole_is_named(read: Read, body: dict[str, Any]) -> None:
    assert "unknown" not in warning_of(read, body)


def test_a_body_of_many_objects_is_not_searched() -> None:
    """The search takes time on the event loop for each object. With --strict-parameters it is made all the same."""
    called = {"role": "assistant", "tool_calls": [CALL | {"odd": 1}] * 3}
    many = {"messages": [called] * 1400, "model": "m"}
    body = json.dumps(many).encode()
    _, warning = parse_chat(body)
    assert warning == "fields are not named: the body has more than 8192 objects"
    with pytest.raises(UnsupportedParameter, match=r"messages\[0\]\.tool_calls\[0\]\.odd"):
        parse_chat(body, strict=True)
