"""Follows calls whose values have no quotes, so that only the text after a tag tells whether a value goes on.

The tags within a call are found as text, and are called marks here. A whole call in a value is part of the value.
"""

import re
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

from saccade.models.tool_formats.call_scanner import MAX_HEAD, CallScanner, Ending, Tag


class End(NamedTuple):
    """A place where a call may end, after *length* characters.

    *last* is the number of the token in which it ends. If *last* is None, *length* determines the token.
    """

    length: int
    last: int | None = None


class BareScanner(CallScanner):
    """A call that ends where its form says. If that place never comes, the best of its possible ends counts.

    `_ends` holds the first possible end of each rank. Rank 0 follows a whole value, and other ranks follow a value
    without an end of its own. `_depth` counts the calls in a value that have begun and not ended.
    """

    marks: re.Pattern[str]

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._texts: list[str] = []
        self._length = 0
        self._lengths: list[int] = []
        """The characters up to each token's end."""

        self._cut: int | None = None
        self._unread = ""
        """What may be the beginning of a mark."""

        self._mark = ""
        """The last mark."""

        self._after_mark = ""
        """The beginning of what follows it."""

        self._ends: dict[int, End] = {}
        self._depth = 0

    @property
    def parts(self) -> list[str]:
        return ["".join(self._texts)[: self._cut]]

    @property
    def in_value(self) -> bool:
        return False

    @property
    def is_whole(self) -> bool:
        return 0 in self._ends

    @abstractmethod
    def take_mark(self, tag_match: re.Match[str], end: int) -> str:
        """Take a mark that ends after *end* characters. Return the name by which it counts from now on."""

    @abstractmethod
    def check_text(self, text: str) -> None:
        """Check the *text* after the last mark; the end of a long text is left out."""

    def push_token(self, text: str, tag: Tag | None = None, before: str = "") -> None:
        if self._number < 0 and tag is None:
            self.before, text = self.without_tag(text)
        super().push_token(text, tag, before)
        self._lengths.append(self._length)

    def without_tag(self, text: str) -> tuple[str, str]:
        """Split *text* before a call that may begin there without its tag, and return both parts."""
        return "", text

    def add_text(self, text: str) -> None:
        start = self._length - len(self._unread)
        self._texts.append(text)
        self._length += len(text)
        text, self._unread = self._unread + text, ""
        place = 0
        for tag_match in self.marks.finditer(text):
            self._pass_text(text[place : tag_match.start()])
            place = tag_match.end()
            self._mark, self._after_mark = self.take_mark(tag_match, start + place), ""
            if self.is_broken or self.ending is not None:
                return
        border = text.rfind("<", place)
        if border < 0 or ">" in text[border:] or len(text) - border > MAX_HEAD:
            border = len(text)
        self._pass_text(text[place:border])
        self._unread = text[border:]
        self.check_text(self._after_mark + self._unread)

    def end_answer(self) -> None:
        if self._ends:
            self._end_at(self._ends[min(self._ends)])
        else:
            self.is_broken = True

    @property
    def _is_after_mark(self) -> bool:
        """Whether nothing but white space follows the last mark."""
        return not (self._unread or self._after_mark.strip())

    def _pass_text(self, text: str) -> None:
        if len(self._after_mark) <= MAX_HEAD:
            self._after_mark += text

    def _end_at(self, end: End) -> None:
        self._cut = end.length
        if end.last is not None:
            self.ending = Ending(end.last)
            return
        last = bisect_left(self._lengths, end.length)
        border = self._lengths[last] if last < len(self._lengths) else self._length
        self.ending = Ending(last, "".join(self._texts)[end.length : border])
