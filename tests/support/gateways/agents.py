"""The first requests of coding agents. The shapes and the lengths of the texts are those of Codex 0.169 and Claude Code
2.1; the texts are not.
"""

from typing import Any


def text(num_characters: int) -> str:
    return ("Do as the user says, and no more than that. " * (num_characters // 40))[:num_characters]


def schema(num_characters: int) -> dict[str, Any]:
    """A tool's parameters, whose JSON has about *num_characters*."""
    properties = {f"value_{n}": {"type": "string", "description": text(80)} for n in range(num_characters // 140 + 1)}
    return {"type": "object", "properties": properties, "required": [], "additionalProperties": False}


def function(name: str, num_characters: int) -> dict[str, Any]:
    half = num_characters // 2
    return {
        "type": "function", "name": name, "description": text(half), "strict": False, "parameters": schema(half)
    }  # fmt: skip


def developer(*lengths: int) -> dict[str, Any]:
    content = [{"type": "input_text", "text": text(length)} for length in lengths]
    return {"type": "message", "id": "msg_1", "role": "developer", "content": content}


def block(num_characters: int, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text(num_characters), **fields}


CACHED = {"cache_control": {"type": "ephemeral"}}
SPACE = {
    "type": "namespace",
    "name": "agents",
    "description": text(300),
    "tools": [function(f"agent_{number}", 1600) for number in range(6)],
}
CODEX = {
    "input": [
        developer(17_000),
        developer(2100, 340),
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": text(440)}]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [
        *(function(f"tool_{number}", 1000) for number in range(7)),
        SPACE,
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "a",
    "client_metadata": {"session_id": "a"},
}
CLAUDE_CODE = {
    "system": [block(74), block(62, **CACHED), block(6800, **CACHED)],
    "messages": [
        {"role": "user", "content": [block(576), block(2)]},
        {"role": "system", "content": [block(9100, **CACHED)]},
    ],
    "tools": [
        {"name": f"Tool{number}", "description": text(1300), "input_schema": schema(1300)} for number in range(12)
    ],
    "metadata": {"user_id": "a"},
    "max_tokens": 32_000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Codex": ("/v1/responses", CODEX, "input"),
    "Claude Code": ("/v1/messages?beta=true", CLAUDE_CODE, "messages"),
}
"""Of each agent: the path, the body without a model, and the field that has the conversation."""
