"""Calls that a grammar holds, and calls that the limit of tokens cuts, on the wires of all APIs: whole and in a stream."""

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest
import scripted
from chats import anthropic_client
from tables import table

from saccade.protocol.output import FinishReason

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
SCHEMA: Final = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
    "required": ["path", "text"],
    "additionalProperties": False,
}
GIVEN: Final = {"path": "a/b.py", "text": 'print("é")\n' * 4}
ARGUMENTS: Final = json.dumps(GIVEN, ensure_ascii=False)
CUT_AT: Final = ARGUMENTS.index("print") + 12
TOOL: Final = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
PATCH: Final = {"type": "custom", "name": "apply_patch"}
SHELL: Final = {"type": "local_shell"}


@pytest.fixture
def holding(gateway: scripted.Gateway) -> Iterator[scripted.Gateway]:
    """The gateway with a worker that takes grammars."""
    with gateway.describing(takes_grammars=True):
        yield gateway


def answer(gateway: scripted.Gateway, name: str, arguments: str, finish: FinishReason) -> None:
    """Have the worker write a call, or what *arguments* has of one if the answer is cut."""
    text = f'\n{{"name": "{name}", "arguments": {arguments}'
    pieces = ("<tool_call>", text) if finish is LENGTH else ("<tool_call>", text + "}\n", "</tool_call>")
    gateway.answer_pieces(*pieces, finish=finish)


def posted(gateway: scripted.Gateway, path: str, **body: Any) -> scripted.Answer:
    found = gateway.ask("POST", f"/v1/{path}", {"model": "tiny", **body})
    assert found.status == 200, found.body
    return found


def chat(gateway: scripted.Gateway, stream: bool, **fields: Any) -> tuple[list[str], str, str | None]:
    """The pieces of the call's arguments, the reason of the end, and the content."""
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "stream": stream, **fields}
    found = posted(gateway, "chat/completions", **asked)
    if not stream:
        choice = found.json["choices"][0]
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "write"
        return [call["function"]["arguments"]], choice["finish_reason"], choice["message"]["content"]
    choices = [event["choices"][0] for event in found.events[:-1]]
    first, *others = [call for one in choices for call in one["delta"].get("tool_calls", ())]
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "write")
    assert first["id"].startswith("call_")
    for other in others:
        assert other.keys() == {"index", "function"}
        assert other["function"].keys() == {"arguments"}
    content = "".join(one["delta"].get("content", "") for one in choices) or None
    pieces = [call["function"]["arguments"] for call in (first, *others)]
    return pieces, choices[-1]["finish_reason"], content


@pytest.mark.ci
@table("forced", [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "write"}}}])
def test_chats(forced: dict[str, Any], holding: scripted.Gateway) -> None:
    answer(holding, "write", ARGUMENTS, STOP)
    assert chat(holding, False, **forced) == ([ARGUMENTS], "tool_calls", None)
    pieces, reason, content = chat(holding, True, **forced)
    assert (pieces[0], "".join(pieces), reason, content) == ("", ARGUMENTS, "tool_calls", None)
    assert len(pieces) > 10


@table("forced", [True, False])
def test_a_chat_that_is_cut(forced: bool, holding: scripted.Gateway) -> None:
    answer(holding, "write", ARGUMENTS[:CUT_AT], LENGTH)
    fields = {"tool_choice": "required" if forced else "auto"}
    [whole], *end = chat(holding, False, **fields)
    pieces, *same_end = chat(holding, True, **fields)
    assert "".join(pieces) == whole == ARGUMENTS[:CUT_AT]
    assert end == same_end == ["length", None]
    assert (len(pieces) > 5) == forced


def test_chats_without_a_grammar_have_whole_calls(gateway: scripted.Gateway) -> None:
    answer(gateway, "write", ARGUMENTS, STOP)
    assert chat(gateway, True) == ([ARGUMENTS], "tool_calls", None)


def message(gateway: scripted.Gateway, stream: bool, **fields: Any) -> tuple[Any, str, list[str]]:
    """The input of the call, the reason of the end, and the pieces of the input in a stream."""
    tools = [{"name": "write", "input_schema": SCHEMA}]
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, "tools": tools, "stream": stream}
    found = posted(gateway, "messages", **asked, **fields)
    if not stream:
        [block] = found.json["content"]
        return block["input"], found.json["stop_reason"], []
    lines = (line[6:] for line in found.body.decode().splitlines() if line.startswith("data: "))
    events = [event for event in map(json.loads, lines) if event["type"] != "ping"]
    begin, *deltas, end = [event for event in events if event["type"].startswith("content_block")]
    assert begin["content_block"].items() >= {"type": "tool_use", "name": "write", "input": {}}.items()
    assert {event["type"] for event in deltas} == {"content_block_delta"}
    assert {event["delta"]["type"] for event in deltas} == {"input_json_delta"}
    assert end["type"] == "content_block_stop"
    [reason] = [event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"]
    return None, reason, [event["delta"]["partial_json"] for event in deltas]


FORCED: Final = {"tool_choice": {"type": "any"}}


def test_messages(holding: scripted.Gateway) -> None:
    answer(holding, "write", ARGUMENTS, STOP)
    assert message(holding, False, **FORCED) == (GIVEN, "tool_use", [])
    _, reason, pieces = message(holding, True, **FORCED)
    assert ("".join(pieces), reason) == (ARGUMENTS, "tool_use")
    assert len(pieces) > 10


@table("fields", [FORCED, {}])
def test_a_message_that_is_cut(fields: dict[str, Any], holding: scripted.Gateway) -> None:
    """The whole one has the members that are complete, as clients read them from a stream."""
    answer(holding, "write", ARGUMENTS[:CUT_AT], LENGTH)
    assert message(holding, False, **fields) == ({"path": GIVEN["path"]}, "max_tokens", [])
    _, reason, pieces = message(holding, True, **fields)
    assert ("".join(pieces), reason) == (ARGUMENTS[:CUT_AT], "max_tokens")


def response(gateway: scripted.Gateway, stream: bool, tool: Any, **fields: Any) -> tuple[Any, Any, list[Any]]:
    """The response, the item of its call, and the events that concern the item."""
    found = posted(gateway, "responses", input="hi", tools=[tool], stream=stream, **fields)
    if not stream:
        [item] = found.json["output"]
        return found.json, item, []
    lines = (line[6:] for line in found.body.decode().splitlines() if line.startswith("data: {"))
    events = list(map(json.loads, lines))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    [item] = events[-1]["response"]["output"]
    return events[-1]["response"], item, events[2:-1]


FUNCTION: Final = {"type": "function", "name": "write", "parameters": SCHEMA}
INPUT: Final = '*** Begin\n"é" \\ 😀 and more and more\n'
RESPONSES: Final[dict[str, tuple[Any, str, str, str, str]]] = {
    "function": (FUNCTION, "write", ARGUMENTS, "function_call_arguments", "arguments"),
    "custom": (PATCH, "apply_patch", json.dumps({"input": INPUT}), "custom_tool_call_input", "input"),
}


@table("kind", RESPONSES)
def test_responses(kind: str, holding: scripted.Gateway) -> None:
    tool, name, arguments, event, field = RESPONSES[kind]
    answer(holding, name, arguments, STOP)
    whole, item, _ = response(holding, False, tool, tool_choice="required")
    assert (whole["status"], item["status"]) == ("completed", "completed")
    assert item[field] == {"arguments": ARGUMENTS, "input": INPUT}[field]
    _, same, events = response(holding, True, tool, tool_choice="required")
    assert same[field] == item[field]
    added, *deltas, done, last = events
    assert (added["type"], added["item"][field], added["item"]["status"]) == (
        "response.output_item.added", "", "in_progress"
    )  # fmt: skip
    assert {delta["type"] for delta in deltas} == {f"response.{event}.delta"}
    assert "".join(delta["delta"] for delta in deltas) == item[field]
    assert len(deltas) > 8
    assert (done["type"], done[field]) == (f"response.{event}.done", item[field])
    assert (last["type"], last["item"]) == ("response.output_item.done", same)
    assert {one["item_id"] for one in (*deltas, done)} == {added["item"]["id"]} == {same["id"]}


@table("forced", [True, False])
@table("kind", RESPONSES)
def test_a_response_that_is_cut(kind: str, forced: bool, holding: scripted.Gateway) -> None:
    tool, name, arguments, _, field = RESPONSES[kind]
    answer(holding, name, arguments[:-12], LENGTH)
    fields = {"tool_choice": "required"} if forced else {}
    whole, item, _ = response(holding, False, tool, **fields)
    streamed, same, events = response(holding, True, tool, **fields)
    assert whole["status"] == streamed["status"] == item["status"] == same["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert item[field] == same[field] == {"arguments": ARGUMENTS[:-12], "input": INPUT[:-9]}[field]
    assert "".join(event.get("delta", "") for event in events) == item[field]


@table("stream", [False, True])
@table("finish", [STOP, LENGTH])
def test_half_a_command_is_none(finish: FinishReason, stream: bool, holding: scripted.Gateway) -> None:
    arguments = '{"command": ["rm", "-r", "/tmp/a b"]}'
    answer(holding, "local_shell", arguments if finish is STOP else arguments[:-8], finish)
    _, item, _ = response(holding, stream, SHELL, tool_choice="required")
    assert item["action"]["command"] == (["rm", "-r", "/tmp/a b"] if finish is STOP else [])
    assert item["status"] == ("completed" if finish is STOP else "incomplete")


@table("finish", [STOP, LENGTH])
def test_clients_join_the_pieces(finish: FinishReason, holding: scripted.Gateway) -> None:
    """As OpenAI's and Anthropic's clients do it: the same as in a whole answer."""
    written = ARGUMENTS if finish is STOP else ARGUMENTS[:CUT_AT]
    answer(holding, "write", written, finish)
    hi: Any = [{"role": "user", "content": "hi"}]
    tools: Any = [{"name": "write", "input_schema": SCHEMA}]
    with anthropic_client(f"http://127.0.0.1:{holding.port}") as client:
        any_tool: Any = {"type": "any"}
        asked: Any = {"model": "tiny", "max_tokens": 99, "messages": hi, "tools": tools, "tool_choice": any_tool}
        with client.messages.stream(**asked) as events:
            [block] = events.get_final_message().content
        [whole] = client.messages.create(**asked).content
    assert block.type == whole.type == "tool_use"
    assert block.input == whole.input == (GIVEN if finish is STOP else {"path": GIVEN["path"]})
    with holding.client() as openai:
        asked = {"model": "tiny", "tool_choice": "required"}
        with openai.responses.stream(**asked, input="hi", tools=[FUNCTION]) as responses:
            *_, last = responses
        assert last.type == ("response.completed" if finish is STOP else "response.incomplete")
        [item] = last.response.output
        assert item.type == "function_call"
        assert item.arguments == written
        if finish is STOP:  # The client refuses a stream that is cut.
            with openai.chat.completions.stream(**asked, messages=hi, tools=[TOOL]) as chunks:
                [call] = chunks.get_final_completion().choices[0].message.tool_calls or []
            assert (call.function.name, call.function.arguments) == ("write", written)
