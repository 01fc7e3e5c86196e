"""Reads JSON in pieces, and returns each part as soon as it is final.

Parts are written as json.dumps with ensure_ascii=False writes them.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from functools import partial
from typing import Any, Final

import msgspec

from saccade.grammars.property_types import typed_as

_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
CHARACTERS: Final = re.compile(
    rf'(?:[^"\\]+|\\[^u]|{_HIGH}\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|(?!{_HIGH})\\u[0-9a-fA-F]{{4}})*', re.DOTALL
)
"""Characters of a string whose escapes are complete, pairs of surrogates included."""

MAX_ESCAPE: Final = 12
SCALAR: Final = re.compile(r'[^\s"{}\[\],:]+')
MARKS: Final = {"{": "{", "[": "[", "}": "}", "]": "]", ",": ", ", ":": ": "}
VALUES: Final = '"s{['
"""How a value begins; `s` stands for a number or a word."""

KEYS: Final = ('"}', '"')
AFTER_VALUE: Final = {"": "", "{": ",}", "[": ",]"}
"""What may follow a value, by the innermost open bracket."""


LEXEME: Final = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+(?=[\s,\]}]))', re.DOTALL)


def escaped(text: str) -> str:
    """Return *text* as it is written within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(value: Any) -> str:
    """Return *value* in JSON, as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def complete_object(text: str) -> str:
    """Return the object that *text* begins, with the members and items that are complete in it."""
    brackets = list[str]()
    end, closing, mark = 0, "}", ""
    place = 0
    while (match := LEXEME.match(text, place)) is not None:
        lexeme, place = match[1], match.end()
        if lexeme in "}]":
            brackets.pop()
        elif lexeme in "{[":
            brackets.append("}" if lexeme == "{" else "]")
        # A string that no colon precedes is the key of a member.
        if lexeme in "{}[]" or (lexeme not in ",:" and (mark == ":" or brackets[-1] == "]")):
            end, closing = place, "".join(reversed(brackets))
        mark = lexeme
    return text[:end] + closing if end else "{}"


class JsonOrder:
    """Checks the order of JSON's lexemes: marks, quoted strings, and numbers and words, whose kind is `s`.

    *allowed* has the kinds that may come next, and is empty once the value is whole.
    """

    def __init__(self) -> None:
        self.allowed = VALUES
        self._brackets = ""

    def take_lexeme(self, kind: str) -> bool:
        """Note the next lexeme, and return whether it may stand here."""
        if kind not in self.allowed:
            return False
        if kind in "{[":
            self._brackets += kind
            self.allowed = KEYS[0] if kind == "{" else f"{VALUES}]"
        elif kind == ",":
            self.allowed = KEYS[1] if self._brackets[-1] == "{" else VALUES
        elif kind == ":" or (kind == '"' and self.allowed in KEYS):
            self.allowed = VALUES if kind == ":" else ":"
        else:
            self._brackets = self._brackets[:-1] if kind in "}]" else self._brackets
            self.allowed = AFTER_VALUE[self._brackets[-1:]]
        return True


class ValuePieces(ABC):
    """A value while it is read. It *is_broken* if its text has another form; *after* is the text after its end."""

    is_broken = False
    after = ""

    @property
    def unread(self) -> str:
        """The text at the end that is not certain yet."""
        return ""

    @abstractmethod
    def push_text(self, text: str) -> str:
        """Take more text, and return what is certain now."""

    @abstractmethod
    def finish_value(self) -> str:
        """Return the rest of the value, after its last text."""


class TextValue(ValuePieces):
    """A string that is written without quotes."""

    _opening = '"'

    def push_text(self, text: str) -> str:
        opening, self._opening = (self._opening, "") if text else ("", self._opening)
        return opening + escaped(text)

    def finish_value(self) -> str:
        return f'{self._opening}"'


class JsonValue(ValuePieces):
    """A value in JSON. Numbers, words and escapes in strings are held back until they are complete."""

    def __init__(self) -> None:
        self._order = JsonOrder()
        self._in_string = False
        self._rest = ""

    @property
    def is_whole(self) -> bool:
        """Whether the value has ended."""
        return not self._order.allowed

    @property
    def unread(self) -> str:
        return self._rest

    def push_text(self, text: str) -> str:
        text, self._rest = self._rest + text, ""
        pieces, place = list[str](), 0
        while place < len(text) and not (self.is_whole or self.is_broken or self._rest):
            piece, place = self._characters(text, place) if self._in_string else self._outside(text, place)
            pieces.append(piece)
        self.after = text[place:] if self.is_whole else ""
        return "".join(pieces)

    def finish_value(self) -> str:
        rest, self._rest = self._rest, ""
        piece = "" if self._in_string or not rest else self._scalar(rest)
        self.is_broken |= not self.is_whole
        return piece

    def _characters(self, text: str, place: int) -> tuple[str, int]:
        """Return the certain characters of a string from *place* on, and the place after them."""
        match = CHARACTERS.match(text, place)
        end = place if match is None else match.end()
        try:
            piece = escaped(msgspec.json.decode(f'"{text[place:end]}"', type=str))
        except (msgspec.MsgspecError, UnicodeError):
            self.is_broken = True
            return "", end
        if end == len(text):
            return piece, end
        if text[end] == '"':
            self._in_string = False
            self._order.take_lexeme('"')
            return f'{piece}"', end + 1
        self._rest = text[end:]
        self.is_broken = len(self._rest) >= MAX_ESCAPE
        return piece, len(text)

    def _outside(self, text: str, place: int) -> tuple[str, int]:
        """Return the next mark or scalar, or "" for white space, and the place after it."""
        character = text[place]
        if character.isspace():
            return "", place + 1
        if character == '"':
            self._in_string, self.is_broken = True, character not in self._order.allowed
            return character, place + 1
        if (mark := MARKS.get(character)) is not None:
            self.is_broken = not self._order.take_lexeme(character)
            return mark, place + 1
        match = SCALAR.match(text, place)
        end = len(text) if match is None else match.end()
        if end == len(text):
            self._rest = text[place:]
            return "", end
        return self._scalar(text[place:end]), end

    def _scalar(self, text: str) -> str:
        self.is_broken = not self._order.take_lexeme("s")
        try:
            return quoted(msgspec.json.decode(text))
        except msgspec.MsgspecError:
            self.is_broken = True
            return ""


class OtherValue(ValuePieces):
    """A value that is not always a string; *read* converts its text. Only objects and arrays come in pieces."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read
        self._text = ""
        self._json: JsonValue | None = None

    @property
    def unread(self) -> str:
        return self._text if self._json is None else self._json.unread

    def push_text(self, text: str) -> str:
        if self._json is None:
            self._text += text
            if self._text.lstrip()[:1] not in ("{", "["):
                return ""
            self._json, text = JsonValue(), self._text
        piece = self._json.push_text(text)
        self.is_broken, self.after = self._json.is_broken, self._json.after
        return piece

    def finish_value(self) -> str:
        if self._json is None:
            return quoted(self._read(self._text))
        piece = self._json.finish_value()
        self.is_broken = self._json.is_broken
        return piece


def value_of(types: Set[str]) -> ValuePieces:
    """Return a reader for a value of *types*, which a model writes without quotes if it can only be a string."""
    return OtherValue(partial(typed_as, types=types)) if types - {"string"} else TextValue()


class ObjectPieces:
    """An object whose members come one after another."""

    def __init__(self) -> None:
        self._num_members = 0

    def key(self, name: str) -> str:
        """Return the JSON before the next member's value."""
        self._num_members += 1
        return f"{', ' if self._num_members > 1 else '{'}{quoted(name)}: "

    def finish_object(self) -> str:
        """Return the JSON after the last member."""
        return "}" if self._num_members else "{}"
