"""Anthropic's messages become chats; errors name the fields that the client sent."""

import json
from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.apis.messages.reader import find_image, parse_count, parse_messages
from saccade.gateway.body_bounds import MAX_BYTES_BESIDE_IMAGES, check_bounds
from saccade.gateway.prompt.messages import read_chat
from saccade.models.family import Family

FAMILY = Family(("Some",), "<image>", template_switches=("enable_thinking",))
PNG = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": [1, 2]}}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}}
BASH = {"type": "bash_20250124", "name": "bash"}
ASKED: dict[str, Any] = {"role": "user", "content": "Look."}
REFERENCE = {"type": "tool_reference", "tool_name": "look"}
REDACTED = {"type": "redacted_thinking", "data": "c2VjcmV0"}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "d"}
ENCODED = {"type": "base64", "media_type": "text/plain", "data": "w6kK"}
FOUND = {"type": "search_result", "source": "http://a", "title": "A", "content": []}


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
    assert (
        names.name_of("response_format.json_schema.schema.properties.a") == "output_config.format.schema.properties.a"
    )


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


def test_thinking_stands_at_the_beginning_of_its_turn() -> None:
    """Templates write it there; answers of Anthropic's models think between calls."""
    said = [{"type": "thinking", "thinking": thought} for thought in ("One.", "", "Two.")]
    turn = {"role": "assistant", "content": [said[0], text("a"), said[1], CALL, said[2], text("b")]}
    chat = read_chat(parse_messages(body(ASKED, turn, ASKED))[0], FAMILY)
    assert chat.messages[1]["reasoning_content"] == "One.\n\nTwo."
    assert chat.messages[1]["content"] == [text("a"), text("b")]
    assert [call["id"] for call in chat.messages[1]["tool_calls"]] == ["t1"]


def _turns_of(*messages: dict[str, Any], **fields: Any) -> tuple[list[Any], str]:
    request, warning, _ = parse_messages(body(*messages, **fields))
    turns = [(message["role"], message["content"]) for message in read_chat(request, FAMILY).messages]
    return turns, warning


@table(
    ("content", "turns", "left_out"),
    [
        pytest.param(
            [text("a"), REFERENCE], [("user", [text("a")])], "messages[0].content[1] (tool_reference)", id="user"
        ),
        pytest.param([REFERENCE], [("user", "")], "messages[0].content[0] (tool_reference)", id="user, only"),
        pytest.param(
            [REFERENCE, {"type": "tool_result", "tool_use_id": "t", "content": "a"}],
            [("tool", "a")],
            "messages[0].content[0] (tool_reference)",
            id="before a result",
        ),
        pytest.param(
            [{"type": "tool_result", "tool_use_id": "t", "content": [REFERENCE, text("a"), REDACTED]}],
            [("tool", [text("a")])],
            "messages[0].content[0].content[0] (tool_reference), messages[0].content[0].content[2] (redacted_thinking)",
            id="in a result",
        ),
        pytest.param(
            [{"type": "tool_result", "tool_use_id": "t", "content": [REFERENCE]}],
            [("tool", "")],
            "messages[0].content[0].content[0] (tool_reference)",
            id="in a result, only",
        ),
        pytest.param(
            [{**FOUND, "content": [REFERENCE, text("a")]}],
            [("user", [text("\nA\nhttp://a\na\n")])],
            "messages[0].content[0].content[0] (tool_reference)",
            id="in a search result",
        ),
    ],
)
def test_skipped_blocks_are_named(content: list[Any], turns: list[Any], left_out: str) -> None:
    assert _turns_of({"role": "user", "content": content}) == (turns, f"blocks left out: {left_out}")


def test_skipped_blocks_of_other_turns_are_named() -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": [REDACTED, text("a")]}
    turns, warning = _turns_of(ASKED, turn, ASKED, system=[text("s"), REFERENCE])
    assert turns == [("system", [text("s")]), ("user", "Look."), ("assistant", [text("a")]), ("user", "Look.")]
    assert warning == "blocks left out: system[1] (tool_reference), messages[1].content[0] (redacted_thinking)"
    turn = {"role": "assistant", "content": [REDACTED]}
    turns, warning = _turns_of(*[ASKED, turn] * 9, ASKED)
    assert [content for role, content in turns if role == "assistant"] == [""] * 9
    assert warning.count("redacted_thinking") == 8
    assert warning.endswith(" and 1 more")


@table(
    ("block", "expected"),
    [
        ({**FOUND, "content": [text("b"), text("c")]}, ["\nA\nhttp://a\nb\nc\n"]),
        (FOUND, ["\nA\nhttp://a\n"]),
        ({"type": "document", "source": PLAIN, "title": "T", "context": "C"}, ["\nT\nC\nd\n"]),
        ({"type": "document", "source": PLAIN, "title": ""}, ["\nd\n"]),
        ({"type": "document", "source": ENCODED, "title": "T"}, ["\nT\né\n"]),
        ({"type": "document", "source": {**ENCODED, "media_type": "application/json"}}, ["\né\n"]),
        ({"type": "document", "source": PNG, "title": "T"}, ["\nT\n", None]),
        ({"type": "document", "source": PNG}, [None]),
        ({"type": "document", "source": {"type": "content", "content": "d"}, "title": "T"}, ["\nT\n", "\nd\n"]),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [text("b"), {"type": "image", "source": PNG}]},
            },
            ["\nb\n", None],
        ),
        ({"type": "document", "source": {"type": "content", "content": []}, "context": "C"}, ["\nC\n"]),
    ],
)
def test_titles_and_sources_stand_in_the_prompt(block: dict[str, Any], expected: list[str | None]) -> None:
    for content in ([block], [{"type": "tool_result", "tool_use_id": "t", "content": [block]}]):
        [(_, parts)], warning = _turns_of({"role": "user", "content": content})
        assert ([part.get("text") for part in parts], warning) == (expected, "")


@table(
    ("source", "fields", "param"),
    [
        ({**ENCODED, "data": "/w=="}, {}, "messages[0].content[0].source.data"),
        ({**ENCODED, "data": "?"}, {}, "messages[0].content[0].source.data"),
        ({**ENCODED, "max_pixels": 9}, {}, "messages[0].content[0].source.max_pixels"),
        (PLAIN, {"max_pixels": 9}, "messages[0].content[0].max_pixels"),
        ({**PLAIN, "data": "a" * (MAX_BYTES_BESIDE_IMAGES + 1)}, {}, "messages[0].content[0].source.data"),
        ({"type": "content"}, {}, "messages[0].content[0].source.content"),
        ({"type": "content", "content": [{"type": "text"}]}, {}, "messages[0].content[0].source.content[0].text"),
        ({"type": "content", "content": [FOUND]}, {}, "messages[0].content[0].source.content[0].type"),
        ({"type": "content", "content": "d"}, {"max_pixels": 9}, "messages[0].content[0].max_pixels"),
        ({"type": "html", "data": "d"}, {}, "messages[0].content[0].source.type"),
    ],
)
def test_documents_that_are_no_text_are_refused_by_their_field(
    source: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        _turns_of({"role": "user", "content": [{"type": "document", "source": source, **fields}]})
    assert refused.value.param == param


def test_anthropics_own_tools_are_left_out() -> None:
    types = ("web_search_20250305", "text_editor_20250728", "computer_20251124", "tool_search_tool_regex_20251119")
    own = [{"type": kind, "name": kind} for kind in types]
    request, warning, names = parse_messages(body(tools=[own[0], TOOL, *own[1:]], tool_choice={"type": "any"}))
    assert [tool["function"]["name"] for tool in read_chat(request, FAMILY).tools] == ["look"]
    assert names.name_of("tools[0].function.parameters") == "tools[1].input_schema"
    assert warning == f"tools of Anthropic's own types left out: {', '.join(types)}"
    assert parse_messages(body(tools=[{"type": "é\n" + "a" * 99}]))[1].endswith(f"out: ??{'a' * 59}...")


def test_deferred_tools_are_declared_as_others() -> None:
    tools = [{**TOOL, "name": f"{at:0128}", "defer_loading": True} for at in range(300)]
    request, warning, _ = parse_messages(body(tools=tools), strict=True)
    assert (len(read_chat(request, FAMILY).tools), warning) == (300, "")


@table(
    ("edit", "is_named"),
    [
        pytest.param({"type": "clear_thinking_20251015", "keep": "all"}, False, id="all thinking kept"),
        pytest.param(
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}},
            False,
            id="two turns kept",
        ),
        pytest.param(
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
            True,
            id="one turn kept",
        ),
        pytest.param({"type": "clear_thinking_20251015"}, True, id="one turn kept by default"),
        pytest.param(
            {"type": "clear_tool_uses_20250919", "clear_tool_inputs": True}, False, id="three calls kept by default"
        ),
        pytest.param(
            {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 1}}, True, id="one call kept"
        ),
        pytest.param(
            {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50000}}, True, id="a summary"
        ),
    ],
)
def test_edits_that_are_not_made_are_named(edit: dict[str, Any], is_named: bool) -> None:
    turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, CALL]}
    turns, warning = _turns_of(ASKED, turn, ASKED, turn, ASKED, context_management={"edits": [edit]}, speed="fast")
    assert len(turns) == 5
    assert warning == (f"edits of context_management not made: {edit['type']}" if is_named else "")


def test_warnings_are_joined() -> None:
    edits = {"edits": [{"type": "compact_20260112"}, {"type": "new"}]}
    given = body({"role": "user", "content": [text("a"), REFERENCE]}, tools=[BASH], context_management=edits, a=1)
    assert (
        parse_count(given)[1]
        == parse_messages(given)[1]
        == (
            "unknown parameters ignored: a; "
            "blocks left out: messages[0].content[1] (tool_reference); "
            "tools of Anthropic's own types left out: bash_20250124; "
            "edits of context_management not made: compact_20260112, new"
        )
    )


def test_a_system_turn_stays_where_it_is() -> None:
    request, _, _ = parse_messages(body(ASKED, {"role": "system", "content": [text("Be brief.")]}, ASKED))
    assert [message.role for message in request.messages] == ["user", "system", "user"]


def test_parameters_without_effect() -> None:
    fields = {"cache_control": {"type": "ephemeral"}, "output_config": {"effort": None}, "service_tier": "auto"}
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
        (InvalidValue, "messages[0].content[0].source", [{"type": "image", "source": "http://a"}]),
        (InvalidValue, "messages[0].content[0].title", [{"type": "search_result", "source": "a", "content": []}]),
        (InvalidValue, "messages[0].content[0].source", [{**FOUND, "source": PNG}]),
        (InvalidValue, "messages[0].content[0].content", [{**FOUND, "content": "a"}]),
        (InvalidValue, "messages[0].content[0].content[0].text", [{**FOUND, "content": [{"type": "text"}]}]),
        (InvalidValue, "messages[0].content[0].content[1]", [{**FOUND, "content": [text("a"), image(PNG)]}]),
        (UnsupportedParameter, "messages[0].content[0].type", [{"type": "server_tool_use"}]),
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
        (UnsupportedParameter, "container", {"container": "c"}),
        (InvalidValue, "tools[0].input_schema", {"tools": [{"name": "look"}]}),
        (InvalidValue, "tools[0].name", {"tools": [{"type": "custom", "input_schema": {}}]}),
        (InvalidValue, "tools[0].name", {"tools": [{**TOOL, "name": "a" * 129}]}),
        (InvalidValue, "tools[1].input_schema", {"tools": [{"type": "mcp_toolset"}, {"name": "look"}]}),
        (InvalidValue, "tools[0].name", {"tools": [{**TOOL, "name": "a b"}]}),
        (InvalidValue, "tools[0].input_schema", {"tools": [{**TOOL, "input_schema": {"type": "array"}}]}),
        (InvalidValue, "tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool"}}),
        (InvalidValue, "tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "one"}}),
        (InvalidValue, "tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}),
        (
            UnsupportedParameter,
            "tool_choice.name",
            {"tools": [TOOL, BASH], "tool_choice": {"type": "tool", "name": "bash"}},
        ),
        (UnsupportedParameter, "tool_choice.type", {"tools": [BASH], "tool_choice": {"type": "any"}}),
        (InvalidValue, "context_management.edits", {"context_management": {"edits": "all"}}),
    ],
)
def test_wrong_parameters_are_refused(error: type[RequestError], param: str, fields: dict[str, Any]) -> None:
    refused(error, param, **fields)


def test_turns_are_checked() -> None:
    refused(InvalidValue, "messages[0].role", {"role": "tool", "content": "a"})
    refused(InvalidValue, "messages[0].content[0]", {"role": "system", "content": [CALL]})
    refused(InvalidValue, "messages", ASKED, {"role": "assistant", "content": [CALL]})
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
