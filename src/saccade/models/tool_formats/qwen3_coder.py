"""Qwen3-Coder's calls, in tags without quotes: `<function=NAME><parameter=NAME>` value `</parameter></function>`."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from saccade.grammars.property_types import property_types, typed
from saccade.models.tool_formats import bare_text, form, hermes
from saccade.models.tool_formats.bare_scanner import BareScanner, End
from saccade.models.tool_formats.call_pieces import Head, MemberCallPieces
from saccade.models.tool_formats.call_scanner import MAX_HEAD, Tag
from saccade.models.tool_formats.json_pieces import value_of

FUNCTION, END_FUNCTION = "<function=", "</function>"
END_PARAMETER: Final = "</parameter>"
PARAMETER: Final = re.compile("<parameter=([^>]*)>")


HEAD: Final = re.compile(r"\s*<function=([^<>\n]*)>\s*")
BETWEEN: Final = re.compile(r"\s*(?:<parameter=([^>]*)>\n|</function>)")
END_OF_VALUE: Final = f"\n{END_PARAMETER}\n"
VALUES: Final = bare_text.ValueTags(
    PARAMETER, END_PARAMETER, re.compile(r"<function=[^<>\n]*>\s*(?=<parameter=|</function>)"), END_FUNCTION
)
SHAPE = bare_text.BareShape(("\n<function={}>\n",), ("<parameter={}>\n",), ("\n</parameter>\n",), ("</function>\n",))


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse `<function=NAME>`, then `<parameter=NAME>` value `</parameter>` for each argument, then `</function>`.

    One line break after a parameter's tag and one before its end do not belong to the value. The function's schema
    determines the type of the value. The last end tags may be missing, and so may `</parameter>` before another
    parameter of the function.
    """
    text = "".join(parts).strip()
    name, bracket, rest = text.removeprefix(FUNCTION).partition(">")
    if not text.startswith(FUNCTION) or not bracket or not rest or name not in functions:
        return None
    schema = functions[name].get("parameters") or {}
    values = bare_text.values_in(rest.removesuffix(END_FUNCTION), VALUES, schema)
    if values is None:
        return None
    texts = {key: value.removeprefix("\n").removesuffix("\n") for key, value in values.items()}
    return form.ParsedCall(name, form.to_json({key: typed(text, key, schema) for key, text in texts.items()}))


class Scanner(BareScanner):
    """Follows a call up to `</function>` and the tag after it. Its end follows `</parameter>` or the function's name.

    Within a value, `</function>` and the call's end tag belong to the value if the call's own end follows. A call
    without its opening tag ends at its own end; text after it does not belong to it.
    """

    marks = re.compile(r"<function=([^<>\n]*)>|<parameter=([^<>\n]*)>|</parameter>|</function>")

    def take_mark(self, tag_match: re.Match[str], end: int) -> str:
        before, follows = self._mark, not self._after_mark.strip()
        if self._is_over:
            self._end_at(self._ends[0])
            return before
        if not before:
            self.is_broken = tag_match[1] not in self._names or not follows
            return "head"
        if before == "head" and (tag_match[1] is not None or tag_match[0] == END_PARAMETER or not follows):
            self.is_broken = True
        is_nested = before == "nested" and follows
        if tag_match[1] is not None:
            return "nested"
        if tag_match[2] is not None or tag_match[0] == END_PARAMETER:
            self._depth += tag_match[2] is not None and is_nested
            return tag_match[0]
        if self._depth and not is_nested:
            self._depth -= 1
        elif not is_nested:
            is_own = follows and before in ("head", END_PARAMETER)
            self._ends.setdefault(0 if is_own else 2, End(end))
            return "end" if is_own else END_FUNCTION
        return "inner end"

    @property
    def _is_over(self) -> bool:
        """Whether the call has no opening tag, and has ended."""
        return self._opened_by is None and self.is_whole

    def without_tag(self, text: str) -> tuple[str, str]:
        places = (place for place, character in enumerate(text) if character == "<")
        begin = next((place for place in places if self._may_begin(text[place:])), len(text))
        return text[:begin], text[begin:]

    def _may_begin(self, text: str) -> bool:
        """Return whether *text* begins with a declared function's opening, or is the beginning of one."""
        heads = (f"{FUNCTION}{name}>" for name in self._names)
        return len(text) <= MAX_HEAD and any(head.startswith(text) or text.startswith(head) for head in heads)

    def check_text(self, text: str) -> None:
        beginning = text.lstrip()
        if not self._mark:
            self.is_broken = not self._may_begin(beginning) or (not beginning and self._opened_by is None)
        elif self._mark == "head":
            may_follow = beginning.startswith("<parameter=") or "<parameter=".startswith(beginning)
            self.is_broken = not may_follow and not END_FUNCTION.startswith(beginning)
        elif self._is_over and beginning:
            self._end_at(self._ends[0])

    def begin_next(self, tag: Tag, text: str) -> None:
        if self._mark in ("", "head"):
            self.is_broken = True
        elif self._depth:
            self.add_text(text)
        elif self.is_whole:
            self._end_at(self._ends[0])
        elif self._mark == END_PARAMETER and self._is_after_mark:
            self._end_at(End(self._length, self._number - 1))
        else:
            self.add_text(text)

    def close(self, tag: Tag, text: str) -> None:
        here = End(self._length, self._number)
        if self._mark in ("", "head"):
            self.is_broken = True
        elif self._depth or (self._mark == "inner end" and self._is_after_mark):
            self.add_text(text)
        elif self._mark in ("end", END_PARAMETER) and self._is_after_mark:
            self._end_at(here)
        elif self.is_whole:
            self._end_at(self._ends[0])
        else:
            self._ends.setdefault(1 if self._mark == END_FUNCTION and self._is_after_mark else 3, here)
            self.add_text(text)


class Pieces(MemberCallPieces):
    """A call whose values end at the first line that has only their end tag."""

    def __init__(self, functions: form.Declared) -> None:
        super().__init__(functions)
        self._head: Head | None = Head(HEAD)
        self._unread = ""
        self._has_ended = False

    @property
    def is_over(self) -> bool:
        return self._has_ended

    @property
    def unread(self) -> str:
        return super().unread + self._unread

    def text(self, text: str) -> str:
        if self._head is not None:
            begin = self._head.push_text(text)
            if begin is None:
                self.is_broken = self._head.is_broken
                return ""
            self._head, text = None, begin.string[begin.end() :]
            self._begin(begin[1])
        self._unread += text
        pieces = list[str]()
        while not self.is_broken and (piece := self._next()) is not None:
            pieces.append(piece)
        return "".join(pieces)

    def finish_arguments(self) -> str:
        self.is_broken |= not self._has_ended
        return super().finish_arguments()

    def _next(self) -> str | None:
        """Return the next piece of the unread text, or None if more text must come first."""
        if self._value is not None:
            return self._of_value()
        tag = None if self._has_ended else BETWEEN.match(self._unread)
        if tag is None:
            self.is_broken = len(self._unread.strip()) > (0 if self._has_ended else MAX_HEAD)
            return None
        self._unread = self._unread[tag.end() :]
        self._has_ended = tag[1] is None
        if self._has_ended:
            return ""
        self._value = value_of(property_types(tag[1], self._schema))
        return self._members.key(tag[1])

    def _of_value(self) -> str | None:
        text = self._unread
        border = text.find(END_OF_VALUE)
        if border >= 0:
            self._unread = text[border + len(END_OF_VALUE) :]
            return self._grow(text[:border]) + self._close()
        sizes = range(min(len(END_OF_VALUE) - 1, len(text)), 0, -1)
        overlap = next((size for size in sizes if END_OF_VALUE.startswith(text[-size:])), 0)
        border = len(text) - overlap
        self._unread = text[border:]
        return self._grow(text[:border]) if border else None


FORMAT = form.ToolFormat(
    hermes.TAGS, parse, Scanner, Pieces, partial(bare_text.rules, SHAPE), bare_text.limits, opening=FUNCTION
)
