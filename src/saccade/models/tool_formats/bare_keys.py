"""Reads arguments as Gemma 4 writes them: with JSON's braces and brackets, bare keys, and strings between tags."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from saccade.grammars.property_types import schema_below, schema_types, typed_as
from saccade.models.tool_formats import form

MAX_DEPTH: Final = 100
LEXEMES: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^{}\[\],:]+', re.DOTALL)
DIGITS: Final = re.compile(r"-?[0-9]{1,300}")
NO_VALUES: Final = frozenset({"null", "None"})


class NoArguments(Exception):
    """The text does not have the form of arguments."""


class Lexeme(NamedTuple):
    """A mark, a string's text, or the text between marks."""

    text: str
    is_string: bool = False


def read_arguments(parts: Sequence[str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in *parts*; every second part is a string's text. Raises NoArguments.

    *schema* says which bare texts are strings.
    """
    lexemes = list[Lexeme]()
    for number, part in enumerate(parts):
        if number % 2:
            lexemes.append(Lexeme(part, is_string=True))
        else:
            lexemes += (Lexeme(text) for text in LEXEMES.findall(part) if text.strip())
    reader = _Reader(lexemes, schema)
    arguments = reader.value(schema)
    if not isinstance(arguments, dict) or not reader.is_at_end:
        raise NoArguments
    return arguments


class _Reader:
    """Reads *lexemes* in order. References resolve within the schema *root*."""

    def __init__(self, lexemes: Sequence[Lexeme], root: Mapping[str, Any]) -> None:
        self._lexemes = lexemes
        self._root = root
        self._place = 0
        self._depth = 0

    @property
    def is_at_end(self) -> bool:
        return self._place == len(self._lexemes)

    def value(self, schema: Any) -> Any:
        """Return the next value."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NoArguments
        if self._next_is("{"):
            value: Any = self._object(schema)
        elif self._next_is("["):
            value = self._array(schema)
        else:
            value = self._scalar(schema)
        self._depth -= 1
        return value

    def _object(self, schema: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._take("{")
        while not self._next_is("}"):
            if values:
                self._take(",")
            key = self._lexeme()
            name = key.text if key.is_string else key.text.strip().strip('"')
            self._take(":")
            values[name] = self.value(schema_below(schema, name, self._root))
        self._take("}")
        return values

    def _array(self, schema: Any) -> list[Any]:
        values: list[Any] = []
        self._take("[")
        while not self._next_is("]"):
            if values:
                self._take(",")
            values.append(self.value(schema_below(schema, None, self._root)))
        self._take("]")
        return values

    def _scalar(self, schema: Any) -> Any:
        first = self._lexeme()
        if first.is_string:
            return first.text
        text = first.text
        while not any(map(self._next_is, ",}]")):
            text += self._lexeme().text
        return bare_value(text.strip(), schema_types(schema, self._root))

    def _next_is(self, mark: str) -> bool:
        return not self.is_at_end and self._lexemes[self._place] == Lexeme(mark)

    def _take(self, mark: str) -> None:
        if not self._next_is(mark):
            raise NoArguments
        self._place += 1

    def _lexeme(self) -> Lexeme:
        if self.is_at_end or self._lexemes[self._place] in map(Lexeme, "{}[],"):
            raise NoArguments
        self._place += 1
        return self._lexemes[self._place - 1]


def bare_value(text: str, types: set[str]) -> Any:
    """Return the value of *text*, which is written without quotes. Raises NoArguments."""
    value = form.json_of(text)
    if value is None and text in NO_VALUES:
        return None
    if types == {"string"} and not isinstance(value, str):
        return text
    if value is None and DIGITS.fullmatch(text):
        return int(text) if types & {"integer", "number"} else text
    if value is None and "string" in types:
        return text
    if value is None:
        raise NoArguments
    return typed_as(text, types) if types and not isinstance(value, str) else value
