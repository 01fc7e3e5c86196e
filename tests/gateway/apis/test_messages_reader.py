"""Anthropic's messages become chats; errors name the fields that the client sent."""

import json
from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.apis.messages.reader import find_image, parse_count, parse_messages
from saccade.gateway.json_body import MAX_BYTES_BESIDE_IMAGES, check_bounds
from saccade.gateway.prompt.messages import read_chat
from saccade.models.family import Family

FAMILY = Family(("Some",), "<image>", template_switches=("enable_thinking",))
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1, 2]}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}}
ASKED = {"role": "user", "content": "Look."}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(source: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image", "source": source}


def body(*messages: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 5, "messages": list(messages or [ASKED]), **fields}).encode()


def _read(given: bytes) -> None:
    request, _, names = parse_messages(given)
    with names.in_errors():
        read_chat(request, FAMILY)


def refused(error: type[RequestError], param: str, *messages: dict[str, Any], **fields: Any) -> None:
    """Check what is raised by the translation, or later by the chat, under the client's name."""
    with pytest.raises(error) as raised:
        _read(body(*messages, **fields))
    assert raised.value.param == param
    assert f"`{param}" in raised.value.message


def test_a_conversation_with_images_and_tools() -> None:
    request, warning, _ = parse_messages(
        body(
            {"role": "user", "content": [text("What is it?"), image(PNG), image({"type": "url", "url": "http://a"})]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, text("I look."), CALL]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("this"), image(PNG)]},
                    text("And now?"),
                ],
            },
            system=[text("Be brief.")],
            tools=[TOOL],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            stop_sequences=["END"],
            temperature=0.5,
            top_k=3,
            metadata={"user_id": "u"},
        )
    )
    assert warning == ""
    chat = read_chat(request, FAMILY)
    assert chat.messages == [
        {"role": "system", "content": [text("Be brief.")]},
        {"role": "user", "content": [text("What is it?"), {"type": "image"}, {"type": "image"}]},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": [text("I look.")],
            "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"at": [1, 2]}}}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [text("this"), {"type": "image"}]},
        {"role": "user", "content": [text("And now?")]},
    ]
    assert [image.url for image in chat.images] == [
        "data:image/png;base64,AAAA", "http://a", "data:image/png;base64,AAAA"
    ]  # fmt: skip
    function = {"name": "look", "description": "Looks.", "parameters": TOOL["input_schema"]}
    assert chat.tools == ({"type": "function", "function": function},)
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)
    assert (request.max_tokens, request.stop, request.temperature, request.top_k) == (5, ["END"], 0.5, 3)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], expected: Any) -> None:
    request, _, _ = parse_messages(body(tools=[TOOL], tool_choice=choice))
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, None)


def test_thinking_sets_the_templates_switch() -> None:
    enabled = {"type": "enabled", "budget_tokens": 2000}
    thinking = [enabled, {"type": "disabled", "budget_tokens": 9}, {"type": "adaptive", "display": "omitted"}]
    requests = [parse_messages(body(thinking=given))[0] for given in thinking]
    assert [
        (request.enable_thinking, request.thinking_token_budget, request.include_reasoning) for request in requests
    ] == [(True, 2000, None), (False, None, None), (None, None, False)]


def test_the_answer_continues_an_assistants_last_message() -> None:
    request, _, _ = parse_messages(body(ASKED, {"role": "assistant", "content": "It is"}))
    chat = read_chat(request, FAMILY)
    assert (chat.continues, chat.add_generation_prompt) == (True, False)
    assert not read_chat(parse_messages(body())[0], FAMILY).continues


def test_a_schema_holds_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request, _, names = parse_messages(body(output_config={"format": {"type": "json_schema", "schema": schema}}))
    assert request.response_format is not None
    assert request.response_format.json_schema is not None
    assert msgspec.json.decode(request.response_format.json_schema.schema) == schema  # type: ignore[arg-type]
    assert names.of("response_format.json_schema.schema.properties.a") == "output_config.format.schema.properties.a"


def test_counting_takes_bodies_of_messages_and_needs_no_max_tokens() -> None:
    request, warning, _ = parse_count(body(temperature=1, stream=True))
    assert (warning, request.max_tokens, len(request.messages)) == ("", None, 1)
    with pytest.raises(InvalidValue, match="`max_tokens` is missing"):
        parse_messages(json.dumps({"model": "m", "messages": [ASKED]}).encode())


def test_text_after_a_call_belongs_to_its_turn() -> None:
    """Streams have it there, and templates write a turn's text before its calls."""
    turn = {"role": "assistant", "content": [text("a"), CALL, text("b")]}
    chat = read_chat(parse_messages(body(ASKED, turn, ASKED))[0], FAMILY)
    assert chat.messages[1]["content"] == [text("a"), text("b")]
    assert [call["id"] for call in chat.messages[1]["tool_calls"]] == ["t1"]


def test_a_system_turn_stays_where_it_is() -> None:
    request, _, _ = parse_messages(body(ASKED, {"role": "system", "content": [text("Be brief.")]}, ASKED))
    assert [message.role for message in request.messages] == ["user", "system", "user"]


def test_parameters_without_effect() -> None:
    fields = {"cache_control": {"type": "ephemeral"}, "output_config": {"effort": "max"}, "service_tier": "auto"}
    request, warning, _ = parse_messages(body(**fields), strict=True)
    assert (warning, request.response_format) == ("", None)


def test_unknown_parameters_are_named() -> None:
    assert parse_messages(body(max_tokns=3))[1] == "unknown parameters ignored: max_tokns (did you mean max_tokens?)"
    with pytest.raises(UnsupportedParameter, match="max_tokns"):
        parse_messages(body(max_tokns=3), strict=True)


@table(
    ("error", "param", "content"),
    [
        (InvalidValue, "messages[0].content", []),
        (InvalidValue, "messages[0].content[0].text", [{"type": "text"}]),
        (InvalidValue, "messages[0].content[0].source", [{"type": "image"}]),
        (InvalidValue, "messages[0].content[0].source.data", [image({"type": "base64"})]),
        (InvalidValue, "messages[0].content[0].source.media_type", [image({**PNG, "media_type": "a,b"})]),
        (RequestError, "messages[0].content[0].source.url", [image({"type": "url", "url": ""})]),
        (InvalidValue, "messages[0].content[0].source.file_id", [image({"type": "file"})]),
        (UnsupportedParameter, "messages[0].content[0].source.type", [image({"type": "text", "data": "f"})]),
        (InvalidValue, "messages[0].content[0].source", [{"type": "document"}]),
        (InvalidValue, "messages[0].content[1]", [text("a"), CALL]),
        (InvalidValue, "messages[0].content[0].tool_use_id", [{"type": "tool_result"}]),
        (InvalidValue, "messages[0].content[1]", [text("a"), {"type": "tool_result", "tool_use_id": "t"}]),
    ],
)
def test_wrong_blocks_are_refused(error: type[RequestError], param: str, content: list[Any]) -> None:
    refused(error, param, {"role": "user", "content": content})


@table(
    ("error", "param", "fields"),
    [
        (InvalidValue, "thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
        (InvalidValue, "output_config.effort", {"output_config": {"effort": "some"}}),
        (UnsupportedParameter, "mcp_servers", {"mcp_servers": [{"url": "http://a"}]}),
        (UnsupportedParameter, "tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (InvalidValue, "tools[0].input_schema", {"tools": [{"name": "look"}]}),
        (InvalidValue, "tools[0].name", {"tools": [{**TOOL, "name": "a b"}]}),
        (InvalidValue, "tools[0].input_schema", {"tools": [{**TOOL, "input_schema": {"type": "array"}}]}),
        (InvalidValue, "tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
        (InvalidValue, "tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "one"}}),
        (InvalidValue, "tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}),
    ],
)
def test_wrong_parameters_are_refused(error: type[RequestError], param: str, fields: dict[str, Any]) -> None:
    refused(error, param, **fields)


def test_turns_are_checked() -> None:
    refused(InvalidValue, "messages[0].role", {"role": "tool", "content": "a"})
    refused(InvalidValue, "messages[0].content[0]", {"role": "system", "content": [CALL]})
    refused(InvalidValue, "messages", ASKED, {"role": "assistant", "content": [CALL]})
    refused(
        UnsupportedParameter,
        "messages[1].content[1]",
        ASKED,
        {"role": "assistant", "content": [CALL, {"type": "thinking", "thinking": "Hm."}]},
        ASKED,
    )
    refused(
        InvalidValue, "messages[1].content[0].input", ASKED, {"role": "assistant", "content": [{**CALL, "input": None}]}
    )


def test_later_errors_have_the_clients_names() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image({"type": "url", "url": ""})]}
    turns = [ASKED, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]}]
    refused(RequestError, "messages[2].content[0].content[0].source.url", *turns, system="s")
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    turns[1] = {"role": "assistant", "content": [{**CALL, "input": {"a": deep}}]}
    turns[2] = ASKED
    refused(InvalidValue, "messages[1].content[0].input", *turns, system="s")


def test_images_do_not_count_as_text() -> None:
    data = "A" * MAX_BYTES_BESIDE_IMAGES
    for source in ({**PNG, "data": data}, {"type": "url", "url": f"data:image/png;base64,{data}"}):
        given = body({"role": "user", "content": [image(source)]})
        check_bounds(given, find_image)
        check_bounds(given.replace(b'"data": "', b'"data" :\n"'), find_image)
    with pytest.raises(RequestError):
        check_bounds(body({"role": "user", "content": data}), find_image)
    # An escaped quote opens no string.
    with pytest.raises(RequestError):
        check_bounds(body({"role": "user", "content": '"data":"' + data}), find_image)
