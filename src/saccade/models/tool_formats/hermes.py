"""Calls as JSON between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
from collections.abc import Iterator, Sequence

from saccade.models.tool_formats import form

TAGS = form.ToolTags("<tool_call>", "</tool_call>")


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse `{"name": ..., "arguments": {...}}`."""
    match form.json_of("".join(parts)):
        case {"name": str(name), "arguments": dict(arguments)} if name in functions:
            return form.ParsedCall(name, form.to_json(arguments))
    return None


def _rules(index: int, function: form.FunctionConstraint, tokens: form.ToolCallTokens) -> Iterator[str]:
    opening, closing = form.quoted(f'\n{{"name": {json.dumps(function.name)}, "arguments": '), form.quoted("}\n")
    yield f"call_{index}: {form.tag(tokens.begin_id)} {opening} arguments_{index} {closing} {form.tag(tokens.end_id)}"
    yield f"arguments_{index}: {form.json_rule(function.parameters)}"


FORMAT = form.ToolFormat(TAGS, parse, _rules)
