"""Follows a call's text token by token, to tell whether it may still be a call, and at which token it ends.

A tag within a value of the call belongs to the value. Each form says where its values end.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Final, Literal, NamedTuple

Tag = Literal["begin", "end", "section_begin", "section_end", "separator"]

MAX_HEAD: Final = 256
"""The most characters between a call's first tag and what shows that it calls a declared function."""


SPACE: Final = re.compile(r"\s*")
IN_STRING: Final = re.compile(r'[^"\\]*')
JSON_OTHERS: Final = re.compile(r"[\s:,0-9.+\-Eaeflnrstu]*")
"""Numbers, true, false and null, and the text between values."""


class Ending(NamedTuple):
    """The end of a call: its *last* token's number, and the *rest* of that token's text, which follows the call."""

    last: int
    rest: str = ""


class CallScanner(ABC):
    """A possible call, from the first token pushed. *names* are the declared functions' names.

    It *is_broken* once no further token can make it a call. It has an *ending* once it has ended.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._number = -1
        self._opened_by: Tag | None = None
        self.is_broken = False
        self.before = ""
        """Text of the first token that is not the call's."""

        self.is_empty = False
        """Whether there are tags and nothing in them."""

        self.ending: Ending | None = None

    @property
    @abstractmethod
    def parts(self) -> list[str]:
        """The text between the outer tags, split at the separators."""

    @property
    @abstractmethod
    def in_value(self) -> bool:
        """Whether a tag that comes now, other than a separator, belongs to a value."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether the call may end here."""

    def push_token(self, text: str, tag: Tag | None = None, before: str = "") -> None:
        """Take the *text* of the next token, which may be a *tag*, and the rest of the text *before* it."""
        self._number += 1
        if before:
            self.add_text(before)
        if self.is_broken or self.ending is not None:
            return
        if tag == "separator":
            self.separate(text)
        elif tag is None or self.in_value:
            self.add_text(text)
        elif self._number == 0:
            self._opened_by = tag
        elif tag in ("begin", "section_begin"):
            self.begin_next(tag, text)
        else:
            self.close(tag, text)

    def finish_answer(self, before: str = "") -> None:
        """Take the end of the answer, and the rest of the text *before* it."""
        if before:
            self.add_text(before)
        if not self.is_broken and self.ending is None:
            self.end_answer()

    def end_answer(self) -> None:
        """End the call with the answer, if it may end."""
        self.end_call(self._number)

    @abstractmethod
    def add_text(self, text: str) -> None:
        """Take text, which may be the text of a tag in a value."""

    def separate(self, text: str) -> None:
        """Take a separator, whose text is *text*."""
        self.add_text(text)

    def begin_next(self, tag: Tag, text: str) -> None:
        """Take a tag that begins another call: this one ended before it."""
        self.end_call(self._number - 1)

    def close(self, tag: Tag, text: str) -> None:
        """Take the tag that ends the call, or its section."""
        self.end_call(self._number)

    def end_call(self, last: int) -> None:
        """End the call with the token number *last*, if it may end there."""
        if self.is_whole:
            self.ending = Ending(last)
        else:
            self.is_broken = True


class SectionScanner(CallScanner):
    """A call that may be the first in a section. Text between the section's tag and the call's tag is left out.

    *parts* are divided at separators; the first is the call's head.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._pieces: list[list[str]] = [[]]
        self._has_begun = False
        """Whether a call has begun in the section."""

    @property
    def parts(self) -> list[str]:
        return ["".join(pieces) for pieces in self._pieces]

    @abstractmethod
    def is_head(self, text: str) -> bool:
        """Return whether *text* names a declared function."""

    def add_text(self, text: str) -> None:
        self._pieces[-1].append(text)
        self.is_broken = len(self._pieces) == 1 and sum(map(len, self._pieces[0])) > MAX_HEAD

    def separate(self, text: str) -> None:
        self.is_broken = len(self._pieces) == 1 and not self.is_head(self.parts[0])
        self._pieces.append([])

    def begin_next(self, tag: Tag, text: str) -> None:
        if tag == "begin" and self._opened_by == "section_begin" and not self._has_begun:
            self._pieces, self._has_begun = [[]], True
        else:
            super().begin_next(tag, text)

    def close(self, tag: Tag, text: str) -> None:
        if len(self._pieces) > 1 or self.parts[0].strip():
            super().close(tag, text)
        elif tag == "end" and self._opened_by == "section_begin":
            self._has_begun = False
        else:
            self.ending, self.is_empty = Ending(self._number), True


class Nesting:
    """The braces, brackets and strings of a growing text. *others* matches what else may be between them."""

    def __init__(self, others: re.Pattern[str]) -> None:
        self._others = others
        self._depth = 0
        self._is_escaped = False
        self.in_string = False
        self.is_whole = False
        """Whether the object is complete."""

        self.is_broken = False

    def push_text(self, text: str) -> None:
        """Take more text."""
        place = 0
        while place < len(text) and not self.is_broken:
            place = self._string(text, place) if self.in_string else self._outside(text, place)

    def _string(self, text: str, place: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        border = _after(IN_STRING, text, place)
        if border < len(text):
            self._is_escaped = self.in_string = text[border] == "\\"
        return border + 1

    def _outside(self, text: str, place: int) -> int:
        is_inside = self._depth > 0
        border = _after(self._others if is_inside else SPACE, text, place)
        if border == len(text):
            return border
        mark = text[border]
        if mark == '"' and is_inside:
            self.in_string = True
        elif mark == "{" or (mark == "[" and is_inside):
            self._depth += 1
            self.is_broken = self.is_whole
        elif mark in "}]" and is_inside:
            self._depth -= 1
            self.is_whole = not self._depth
        else:
            self.is_broken = True
        return border + 1


def _after(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Return where the match of *pattern* ends; the pattern always matches."""
    matched = pattern.match(text, place)
    return place if matched is None else matched.end()
