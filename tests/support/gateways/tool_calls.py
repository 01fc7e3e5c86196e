"""Tools for tests, and a check of the calls with which a server's model answers."""

import json
from typing import Any

import jsonschema
from chats import openai_messages, random_image
from server import Server

SIDE = {"type": "string", "enum": ["left", "right"]}
EDGE = {"type": "integer", "minimum": 0, "maximum": 9}


def _tool(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


TOOLS = [_tool("zoom", ["side"], side=SIDE, edge=EDGE), _tool("turn-it", ["back"], back={"type": "boolean"})]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def add_pieces(calls: list[Any], pieces: list[Any]) -> None:
    """Add the calls of a chunk, or more of the last one's arguments."""
    for piece in pieces:
        if piece.id is not None:
            calls.append(piece)
        else:
            calls[-1].function.arguments += piece.function.arguments


def check_calls(server: Server, names: set[str] | None, stream: bool = False, **options: Any) -> None:
    """Ask for calls; check that every answer that was not cut has some, each of one of *names*, or of any tool.

    The last call of an answer that was cut may be cut, too.
    """
    messages = openai_messages(random_image(64, 64, 5), "Zoom.")
    asked = {"model": server.model, "messages": messages, "tools": TOOLS, "max_tokens": 600, **options}
    calls: dict[int, list[Any]] = {}
    reasons: dict[int, str] = {}
    with server.client() as client:
        if stream:
            for chunk in client.chat.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    add_pieces(calls.setdefault(choice.index, []), choice.delta.tool_calls or [])
                    reasons[choice.index] = choice.finish_reason or reasons.get(choice.index, "")
                    assert not choice.delta.content
        else:
            for choice in client.chat.completions.create(**asked).choices:
                calls[choice.index], reasons[choice.index] = choice.message.tool_calls or [], choice.finish_reason
    assert set(calls) == set(range(options.get("n", 1)))
    for index, found in calls.items():
        assert reasons[index] == "length" or (reasons[index] == "tool_calls" and found)
        for call in found[:-1] if reasons[index] == "length" else found:
            assert call.function.name in (names or SCHEMAS)
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert "tool_calls" in reasons.values()
