"""Kimi-K3's calls, in a section: a `call` with the function's name, and for each argument its name and type.

A string argument is plain text, and every other one is JSON. Each tag consists of several tokens (markup.py). Saccade's
engine does not run the model, so a structural tag for xgrammar constrains the answers. vLLM, SGLang and TokenSpeed have
xgrammar; there, a special token matches its text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from saccade.grammars.json_schema import SupportedSchema
from saccade.grammars.schema_places import Schema
from saccade.models.tool_formats import form
from saccade.models.tool_formats.call_pieces import Mark, MemberCallPieces
from saccade.models.tool_formats.call_scanner import MAX_HEAD, SectionScanner
from saccade.models.tool_formats.json_pieces import JsonValue, OtherValue, TextValue
from saccade.tokenization.markup import BORDER, CALL, END_CALL, END_TOOLS, TOOLS

ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')
OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
UNENFORCED: Final = ("allOf", "maxLength", "minLength", "patternProperties")
"""Keywords that xgrammar does not enforce, lengths where texts have no tags."""

MAX_SPACES: Final = 40
"""As in other grammars: without a bound, a model could write spaces for ever."""

Format = dict[str, Any]
TOKENS: Final = form.ToolCallTokens("kimi_k3", CALL, END_CALL, TOOLS, END_TOOLS, BORDER)


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse the call's tag, then for each argument the text before it, its tag and its value."""
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


class Scanner(SectionScanner):
    """Follows a call's parts: its tag, then for each argument the text before it, its tag and its value."""

    @property
    def in_value(self) -> bool:
        return len(self._pieces) > 3 and len(self._pieces) % 3 == 1

    @property
    def is_whole(self) -> bool:
        return len(self._pieces) % 3 == 2

    def is_head(self, text: str) -> bool:
        return _attributes(text).get("tool") in self._names


class Pieces(MemberCallPieces):
    """Reads a call's tag, then for each argument the text before it, its tag and its value, divided by separators."""

    def __init__(self, functions: form.Declared) -> None:
        super().__init__(functions)
        self._part: Literal["call", "before", "argument", "value"] = "call"
        self._tag = ""
        self._is_json = False
        """Whether one value has all arguments."""

    @property
    def unread(self) -> str:
        return super().unread + self._tag

    def text(self, text: str) -> str:
        if self._part in ("before", "value"):
            return self._grow(text)
        self._tag += text
        self.is_broken = len(self._tag) > MAX_HEAD
        return ""

    def mark(self, mark: Mark) -> str:
        tag, self._tag = self._tag, ""
        match self._part:
            case "call":
                self._part = "before"
                self._begin(_attributes(tag).get("tool", ""))
            case "before":
                self._part = "argument"
                self.is_broken |= self._is_json
            case "argument":
                self._part = "value"
                return self._open(tag)
            case "value":
                self._part = "before"
                return self._close()
        return ""

    def finish_arguments(self) -> str:
        last = super().finish_arguments()
        return "" if self._is_json else last

    def _open(self, tag: str) -> str:
        """Begin the value after its *tag*."""
        attributes = _attributes(tag)
        if tag.startswith("json"):
            self._is_json, self._value = True, JsonValue()
            return ""
        kind = attributes.get("type", "string")
        self._value = TextValue() if kind == "string" else OtherValue(partial(_value, kind=kind))
        self.is_broken = "key" not in attributes
        return self._members.key(attributes.get("key", ""))


def tool_variables(tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the template's variable for *tools*, with sorted keys, as in the releases' code."""
    return {"tools": form.with_sorted_keys(list(tools))}


def _limits(function: form.FunctionConstraint, enforced: SupportedSchema) -> SupportedSchema:
    return form.without(UNENFORCED, function, enforced)


def _structural_tag(calls: form.CallConstraint) -> str:
    """Return a whole answer's form for xgrammar: reasoning, if the prompt ends in it, the response, and *calls*."""
    any_text = {"type": "any_text", "excludes": [OPEN, CLOSE, END_OF_MESSAGE]}
    called = {"type": "tags_with_separator", "tags": [_call(function) for function in calls.functions], "separator": ""}
    section = _tag(
        f"{OPEN}tools{SEP}", {**called, "at_least_one": True, "stop_after_first": not calls.many}, f"{CLOSE}tools{SEP}"
    )
    end = f"{CLOSE}response{SEP}"
    answers = [_sequence(_constant(end), section)] if calls.functions else []
    if calls.content is not None:
        answers.append(_tag("", _json(json.loads(calls.content.text)), end))
    elif not calls.must_call:
        answers = [_sequence(_tag("", any_text, end), {"type": "optional", "content": section})]
    reasoning = _tag("", any_text, f"{CLOSE}think{SEP}{OPEN}response{SEP}")
    answer: Format = {"type": "or", "elements": answers}
    whole = _sequence({"type": "optional", "content": reasoning}, answer, _constant(f"{CLOSE}message{SEP}"))
    return json.dumps({"type": "structural_tag", "format": whole}, ensure_ascii=False)


def _call(function: form.FunctionConstraint) -> Format:
    number: Format = {"type": "regex", "pattern": "[1-9][0-9]{0,2}"}
    inside = _sequence(number, _constant(f'"{SEP}'), _json(function.parameters) | {"style": f"{TOKENS.format}_xml"})
    return _tag(f'{OPEN}call tool="{function.name}" index="', inside, f"{CLOSE}call{SEP}")


def _json(schema: Schema) -> Format:
    excluded = [OPEN, CLOSE, SEP]
    return {"type": "json_schema", "json_schema": schema, "excludes": excluded, "max_whitespace_cnt": MAX_SPACES}


def _tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": elements}


def _constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


FORMAT = form.ToolFormat(
    form.ToolTags("<|open|>call", "<|close|>call"),
    parse,
    Scanner,
    Pieces,
    limits=_limits,
    variables=tool_variables,
    markup=TOKENS,
    numbers_calls=True,
    structural_tag=_structural_tag,
)
