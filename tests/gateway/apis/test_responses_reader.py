"""Items of Responses become messages of a chat; errors name the fields that the client sent."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.apis.responses.conversation import read_conversation
from saccade.gateway.apis.responses.reader import parse_response
from saccade.gateway.chat import Chat
from saccade.gateway.chat_request import ChatMessage
from saccade.gateway.prompt.messages import read_chat
from saccade.models.family import Family

FAMILY = Family(("Some",), "<image>", template_switches=("enable_thinking",))
IMAGE = {"type": "input_image", "image_url": "http://a", "detail": "low"}
CALL = {
    "type": "function_call",
    "call_id": "c1",
    "name": "look",
    "arguments": '{"at": [1]}',
    "id": "fc",
    "status": "completed",
}
READ_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": [1]}}}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "red"}
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, "id": "m", "status": "completed"}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def text(written: str) -> dict[str, Any]:
    return {"type": "text", "text": written}


def parsed(given: Any, known: Sequence[ChatMessage] = (), **fields: Any) -> tuple[Any, Chat]:
    """Return the request of a chat, and the chat; errors have the client's names."""
    asked, warning = parse_response(json.dumps({"model": "m", "input": given, **fields}).encode())
    assert warning == ""
    read = read_conversation(asked, known)
    with read.names.in_errors():
        return read.chat, read_chat(read.chat, FAMILY)


def test_a_string_is_a_users_message() -> None:
    request, chat = parsed("hi", instructions="Be brief.", max_output_tokens=7, temperature=0.5, top_p=0.5)
    assert chat.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert (request.max_tokens, request.temperature, request.top_p) == (7, 0.5, 0.5)


def test_items_of_a_turn_are_one_message() -> None:
    _, chat = parsed(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "What?"}, IMAGE]},
            thought("Hm."),
            said("I look."),
            CALL,
            {**CALL, "call_id": "c2"},
            RESULT,
            {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "this"}, IMAGE]},
            said("Red."),
            {"role": "developer", "content": "Go on."},
        ]
    )
    assert chat.messages == [
        {"role": "user", "content": [text("What?"), {"type": "image"}]},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": [text("I look.")],
            "tool_calls": [READ_CALL, {**READ_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "red"},
        {"role": "tool", "tool_call_id": "c2", "content": [text("this"), {"type": "image"}]},
        {"role": "assistant", "content": [text("Red.")]},
        {"role": "system", "content": "Go on."},
    ]
    assert [(image.url, image.options.detail) for image in chat.images] == [("http://a", "low")] * 2


@table(
    ("items", "contents"),
    [
        ([said("a"), said("b")], [[text("a")], [text("b")]]),
        ([said("a"), thought("t"), said("b")], [[text("a")], [text("b")]]),
        ([said("a"), CALL, said("b")], [[text("a"), text("b")]]),
        ([thought("a"), thought("b"), CALL], [""]),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}, said("b")], [[text("b")]]),
    ],
)
def test_turns_that_templates_cannot_write_are_split(items: list[Any], contents: list[Any]) -> None:
    _, chat = parsed([{"role": "user", "content": "hi"}, *items])
    assert [message["content"] for message in chat.messages[1:]] == contents


def test_conversation_continues_a_stored_one() -> None:
    known = [ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="yes")]
    _, chat = parsed("And?", known, instructions="Be brief.", previous_response_id="resp_1")
    assert [message["content"] for message in chat.messages] == ["Be brief.", "hi", "yes", "And?"]


def test_tools_and_schemas() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    request, chat = parsed(
        "hi",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": form, "verbosity": "medium"},
    )
    function = {key: value for key, value in TOOL.items() if key != "type"}
    assert chat.tools == ({"type": "function", "function": function},)
    assert request.tool_choice == {"type": "function", "function": {"name": "look"}}
    assert request.parallel_tool_calls is False
    assert chat.switches == {"enable_thinking": False}
    assert request.response_format.json_schema.strict is True
    assert bytes(request.response_format.json_schema.schema) == b'{"type": "object"}'


@table(
    ("error", "param", "given"),
    [
        (UnsupportedParameter, "input[0].type", [{"type": "of another kind", "id": "m"}]),
        (InvalidValue, "input[0].call_id", [{"type": "custom_tool_call_output", "output": "a"}]),
        (InvalidValue, "input[0].output", [{**RESULT, "output": {"type": "computer_screenshot"}}]),
        (InvalidValue, "input[0].input", [{"type": "custom_tool_call", "call_id": "c", "name": "patch"}]),
        (InvalidValue, "input[0].action", [{"type": "local_shell_call", "call_id": "c"}]),
        (InvalidValue, "input[0].arguments", [{**CALL, "arguments": {"at": 1}}]),
        (InvalidValue, "input[0].tools[0].type", [{"type": "additional_tools", "tools": [{}]}]),
        (InvalidValue, "input[0].role", [{"role": "tool", "content": "a"}]),
        (InvalidValue, "input[0].content", [{"role": "user"}]),
        (InvalidValue, "input[0].call_id", [{**RESULT, "call_id": None}]),
        (InvalidValue, "input[0].output", [{**RESULT, "output": None}]),
        (InvalidValue, "input[1].name", [said("a"), {**CALL, "name": None}]),
        (InvalidValue, "input[0].content[0].text", [{"role": "user", "content": [{"type": "input_text"}]}]),
        (InvalidValue, "input[0].content[0].image_url", [{"role": "user", "content": [{"type": "input_image"}]}]),
        (RequestError, "input[0].content[0].image_url", [{"role": "user", "content": [{**IMAGE, "image_url": ""}]}]),
        (InvalidValue, "input[0].content[0].file_data", [{"role": "user", "content": [{"type": "input_file"}]}]),
        (UnsupportedParameter, "input[0].content[0].type", [{"role": "user", "content": [{"type": "input_audio"}]}]),
    ],
)
def test_wrong_items_are_refused(error: type[RequestError], param: str, given: list[Any]) -> None:
    with pytest.raises(error) as raised:
        parsed(given, instructions="Be brief.")
    assert raised.value.param == param


@table(
    ("error", "param", "fields"),
    [
        (UnsupportedParameter, "background", {"background": True}),
        (UnsupportedParameter, "conversation", {"conversation": "c"}),
        (InvalidValue, "truncation", {"truncation": "some"}),
        (UnsupportedParameter, "include", {"include": ["message.output_text.logprobs"]}),
        (UnsupportedParameter, "top_logprobs", {"top_logprobs": 3}),
        (InvalidValue, "reasoning.effort", {"reasoning": {"effort": "some"}}),
        (InvalidValue, "tools[0].type", {"tools": [{}]}),
        (InvalidValue, "tools[0].name", {"tools": [{"type": "custom"}]}),
        (InvalidValue, "tools[0].format", {"tools": [{"type": "custom", "name": "patch", "format": {"type": "xml"}}]}),
        (InvalidValue, "tools[0].tools", {"tools": [{"type": "namespace", "name": "a"}]}),
        (
            InvalidValue,
            "tools[0].tools[0].name",
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
        ),
        (
            UnsupportedParameter,
            "tools[0].tools[0].type",
            {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
        ),
        (UnsupportedParameter, "tool_choice.type", {"tools": [TOOL, {"type": "mcp"}], "tool_choice": {"type": "mcp"}}),
        (InvalidValue, "tool_choice", {"tools": [TOOL], "tool_choice": {"type": "custom", "name": "patch"}}),
        (InvalidValue, "tools[0].name", {"tools": [{"type": "function"}]}),
        (InvalidValue, "tools[0].parameters", {"tools": [{**TOOL, "parameters": {"type": "array"}}]}),
        (InvalidValue, "tool_choice", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}),
        (InvalidValue, "max_output_tokens", {"max_output_tokens": 0}),
    ],
)
def test_wrong_parameters_are_refused(error: type[RequestError], param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(error) as raised:
        parsed("hi", **fields)
    assert raised.value.param == param


def test_parameters_without_effect() -> None:
    parsed(
        "hi",
        include=["reasoning.encrypted_content"],
        user="u",
        stream_options={"include_obfuscation": False},
        background=False,
    )


def test_a_long_string_is_not_read_letter_by_letter() -> None:
    """Requests are read on the event loop: nothing may be asked of each of two million letters."""

    def num_questions(length: int) -> int:
        asked, _ = parse_response(json.dumps({"model": "m", "input": "a" * length}).encode())
        questions = Counter[str]()
        sys.setprofile(lambda _, event, __: questions.update([event]))
        try:
            read_conversation(asked)
        finally:
            sys.setprofile(None)
        return questions.total()

    assert num_questions(10_000) == num_questions(10)
