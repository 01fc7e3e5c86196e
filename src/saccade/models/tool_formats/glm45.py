"""GLM-4.5's calls: a name, then for each argument `<arg_key>NAME</arg_key><arg_value>` value `</arg_value>`."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from saccade.grammars.property_types import property_types, typed
from saccade.models.tool_formats import bare_text, form, hermes
from saccade.models.tool_formats.bare_scanner import BareScanner, End
from saccade.models.tool_formats.call_pieces import Mark, MemberCallPieces
from saccade.models.tool_formats.call_scanner import MAX_HEAD, Tag
from saccade.models.tool_formats.json_pieces import value_of

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
PARAMETER: Final = re.compile(rf"{KEY}([^<]*){END_KEY}\s*{VALUE}")
DAMAGED: Final = re.compile(
    rf"(?:{KEY})?([^<]{{1,256}}?)(?:{END_KEY}\s*(?:{VALUE}|(?=[^<]*{END_VALUE}))|(?<!\s)\s*{VALUE})"
)
"""A parameter that lacks one of the three tags before its value."""


VALUES: Final = bare_text.ValueTags(
    PARAMETER, END_VALUE, re.compile(rf"<tool_call>\s*[\w.-]+\s*(?={KEY})"), "</tool_call>", DAMAGED
)
TAGS = hermes.TAGS._replace(key_begin=KEY, key_end=END_KEY, value_begin=VALUE, value_end=END_VALUE)
SHAPE = bare_text.BareShape(
    ("{}\n",), ("key_begin_id", "{}", "key_end_id", "\n", "value_begin_id"), ("value_end_id", "\n")
)


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse the function's name, then each argument's name and value, which has the type in the function's schema.

    One tag of a parameter may be missing.
    """
    text = "".join(parts).strip()
    name = re.split(r"[<\n]", text, maxsplit=1)[0]
    if name.strip() not in functions:
        return None
    schema = functions[name.strip()].get("parameters") or {}
    values = bare_text.values_in(text[len(name) :], VALUES, schema)
    if values is None:
        return None
    return form.ParsedCall(name.strip(), form.to_json({key: typed(text, key, schema) for key, text in values.items()}))


class Scanner(BareScanner):
    """Follows a call up to the end tag after a whole value.

    Within a value, an end tag belongs to the value if the value's own end follows.
    """

    marks = re.compile(r"</?arg_(?:key|value)>")
    _has_value = False
    """Whether a value has begun that has not ended."""

    @property
    def is_whole(self) -> bool:
        return not self._is_in_value and self._mark == END_VALUE

    @property
    def _is_in_value(self) -> bool:
        return self._has_value or (self._mark == END_VALUE and not self._is_after_mark)

    def take_mark(self, tag_match: re.Match[str], end: int) -> str:
        mark, before, between = tag_match[0], self._mark, self._after_mark
        if not before:
            name = between if mark == KEY else between.lstrip().partition("\n")[0]
            self.is_broken = not self._names_function(name)
        self._depth += before == "begin" and mark == KEY and _is_name(between)
        if self._depth:
            return "inner"
        if mark in (VALUE, END_VALUE):
            self._has_value = mark == VALUE
        return mark

    def check_text(self, text: str) -> None:
        if not self._mark:
            line, end, _ = text.lstrip().partition("<")[0].partition("\n")
            is_known = (
                self._names_function(line) if end else any(name.startswith(line.rstrip()) for name in self._names)
            )
            self.is_broken = not is_known or len(text) > MAX_HEAD

    def end_answer(self) -> None:
        if self.is_whole:
            self._end_at(End(self._length, self._number))
        else:
            super().end_answer()

    def begin_next(self, tag: Tag, text: str) -> None:
        if self._is_in_value:
            self.add_text(text)
            self._has_value, self._mark, self._after_mark = True, "begin", ""
        elif self.is_whole:
            self._end_at(End(self._length, self._number - 1))
        else:
            self.is_broken = True

    def close(self, tag: Tag, text: str) -> None:
        here = End(self._length, self._number)
        if self.is_whole or (not self._mark and self._names_function(self._after_mark)):
            self._end_at(here)
        elif not self._is_in_value:
            self.is_broken = True
        elif self._mark != "begin" or not _is_name(self._after_mark):
            if self._depth:
                self._depth -= 1
            else:
                self._ends.setdefault(1, here)
            self.add_text(text)
            self._mark = "inner"
        else:
            self.add_text(text)

    def _names_function(self, text: str) -> bool:
        return text.strip() in self._names


def _is_name(text: str) -> bool:
    """Return whether *text* may be a function's name; an undeclared one may be in an example."""
    return re.fullmatch(r"[\w.-]+", text.strip()) is not None


class Pieces(MemberCallPieces):
    """A call whose arguments stand between tags that are tokens."""

    def __init__(self, functions: form.Declared) -> None:
        super().__init__(functions)
        self._word: str | None = ""
        """The name of the function or of an argument, while it is written."""

        self._key: str | None = None

    @property
    def unread(self) -> str:
        return super().unread + (self._key or "") + (self._word or "")

    def text(self, text: str) -> str:
        if self._word is None:
            return self._grow(text)
        self._word += text
        self.is_broken = len(self._word) > MAX_HEAD
        return ""

    def mark(self, mark: Mark) -> str:
        word, self._word = self._word, None
        match mark:
            case "key_begin" if self._value is None and self._key is None:
                if not self.name:
                    self._begin((word or "").strip())
                self._word = ""
                return ""
            case "key_end" if self.name and word is not None:
                self._key = word
                return ""
            case "value_begin" if self._key is not None:
                key, self._key = self._key, None
                self._value = value_of(property_types(key, self._schema))
                return self._members.key(key)
            case "value_end":
                return self._close()
        self.is_broken = True
        return ""

    def finish_arguments(self) -> str:
        if not self.name:
            self._begin((self._word or "").strip())
        return super().finish_arguments()


FORMAT = form.ToolFormat(TAGS, parse, Scanner, Pieces, partial(bare_text.rules, SHAPE), bare_text.limits)
