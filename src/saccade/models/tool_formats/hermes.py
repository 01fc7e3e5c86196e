"""Calls in Hermes' form, JSON between tags: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from saccade.models.tool_formats import form
from saccade.models.tool_formats.call_pieces import Head, JsonCallPieces
from saccade.models.tool_formats.call_scanner import JSON_OTHERS, CallScanner, Nesting

TAGS = form.ToolTags("<tool_call>", "</tool_call>")
HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
"""All before the arguments."""


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse `{"name": ..., "arguments": {...}}`."""
    match form.json_of("".join(parts)):
        case {"name": str(name), "arguments": dict(arguments)} if name in functions:
            return form.ParsedCall(name, form.to_json(arguments))
    return None


class Scanner(CallScanner):
    """Follows a call's JSON. A string ends at its closing quote."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._json = Nesting(JSON_OTHERS)
        self._pieces: list[str] = []

    @property
    def parts(self) -> list[str]:
        return ["".join(self._pieces)]

    @property
    def in_value(self) -> bool:
        return self._json.in_string

    @property
    def is_whole(self) -> bool:
        return self._json.is_whole

    def add_text(self, text: str) -> None:
        self._pieces.append(text)
        self._json.push_text(text)
        self.is_broken = self._json.is_broken


class Pieces(JsonCallPieces):
    """A call in JSON, with the name before the arguments."""

    closing = "}"

    def __init__(self, functions: form.Declared) -> None:
        super().__init__(functions)
        self._head = Head(HEAD)

    def text(self, text: str) -> str:
        if self.name:
            return self._arguments(text)
        begin = self._head.push_text(text)
        if begin is None:
            self.is_broken = self._head.is_broken
            return ""
        self._begin(str(form.json_of(begin[1])))
        return "" if self.is_broken else self._arguments(begin.string[begin.end() :])


def _rules(index: int, function: form.FunctionConstraint, tokens: form.ToolCallTokens) -> Iterator[str]:
    opening, closing = form.quoted(f'\n{{"name": {json.dumps(function.name)}, "arguments": '), form.quoted("}\n")
    yield f"call_{index}: {form.tag(tokens.begin_id)} {opening} arguments_{index} {closing} {form.tag(tokens.end_id)}"
    yield f"arguments_{index}: {form.json_rule(function.parameters)}"


FORMAT = form.ToolFormat(TAGS, parse, Scanner, Pieces, _rules)
