"""Calls of Kimi-K3 in a section: `call` with the function's name, and an `argument` with a name and a type for each.

An argument of the type string is plain text, every other one JSON. The tags are of several tokens (markup.py). Grammars
of them are not served.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from saccade.errors import UnsupportedParameter
from saccade.grammars.json_schema import SupportedSchema
from saccade.models.tool_formats import form
from saccade.tokenization.markup import BORDER, CALL, END_CALL, END_TOOLS, TOOLS

ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')
TOKENS: Final = form.ToolCallTokens("kimi_k3", CALL, END_CALL, TOOLS, END_TOOLS, BORDER)


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse the call's tag, then for each argument what is before it, its tag and its value."""
    name = _attributes(parts[0]).get("tool", "")
    tags, values = parts[2::3], parts[3::3]
    if name not in functions or len(tags) != len(values) or any(part.strip() for part in parts[1::3]):
        return None
    arguments: dict[str, Any] = {}
    for tag, value in zip(tags, values, strict=True):
        attributes = _attributes(tag)
        if tag.startswith("json"):
            whole = form.json_of(value)
            return form.ParsedCall(name, form.to_json(whole)) if isinstance(whole, dict) and len(tags) == 1 else None
        if "key" not in attributes:
            return None
        arguments[attributes["key"]] = _value(value, attributes.get("type", "string"))
    return form.ParsedCall(name, form.to_json(arguments))


def _attributes(tag: str) -> dict[str, str]:
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in ATTRIBUTE.findall(tag)}


def _value(text: str, kind: str) -> Any:
    if kind == "string":
        return text
    value = form.json_of(text)
    return text if value is None and text.strip() != "null" else value


def _sorted(value: Any) -> Any:
    match value:
        case dict():
            return {key: _sorted(value[key]) for key in sorted(value)}
        case list():
            return [_sorted(item) for item in value]
    return value


def tool_variables(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the template's variable for *tools*, with sorted keys as the releases' code has them."""
    return {"tools": _sorted(list(tools))}


def _limits(function: form.FunctionConstraint, enforced: SupportedSchema) -> SupportedSchema:
    raise UnsupportedParameter(
        f"`{function.place}`: calls of this model's tools cannot be required, strict, or combined with a JSON answer.",
        function.place,
    )


def _rules(index: int, function: form.FunctionConstraint, tokens: form.ToolCallTokens) -> Iterator[str]:
    raise NotImplementedError


FORMAT = form.ToolFormat(
    form.ToolTags("<|open|>call", "<|close|>call"),
    parse,
    _rules,
    _limits,
    tool_variables,
    markup=TOKENS,
    numbers_calls=True,
)
