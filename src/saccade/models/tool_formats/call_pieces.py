"""Reads a call in pieces: its name, then its arguments as soon as they are certain.

It reads only calls in the exact form of their grammar, so no text that was read can turn out to be something else.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from saccade.models.tool_formats.call_scanner import MAX_HEAD
from saccade.models.tool_formats.json_pieces import JsonValue, ObjectPieces, ValuePieces

Mark = Literal["separator", "key_begin", "key_end", "value_begin", "value_end"]
"""The tags within a call."""


class CallPieces(ABC):
    """A call of one of *functions*, after its opening tag. Its *name* and *id* are known once *name* is not "".

    The returned pieces together are the arguments. The call *is_broken* once its text has another form; what the last
    step returned then does not count.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        self._functions = functions
        self.name = ""
        self.id: str | None = None
        self.is_broken = False

    @property
    def is_over(self) -> bool:
        """Whether the arguments are complete even before the call's end tag."""
        return False

    @property
    def unread(self) -> str:
        """The text after the function's name that is in no piece yet."""
        return ""

    @abstractmethod
    def text(self, text: str) -> str:
        """Take text, and return the next piece of the arguments."""

    def mark(self, mark: Mark) -> str:
        """Take a tag within the call, and return the next piece of the arguments."""
        self.is_broken = True
        return ""

    @abstractmethod
    def finish_arguments(self) -> str:
        """Return the last piece of the arguments, before the call's end tag."""

    def _begin(self, name: str) -> None:
        """Set the name if it is a function's; otherwise, the call is broken."""
        self.name = name if name in self._functions else ""
        self.is_broken = not self.name

    @property
    def _schema(self) -> Mapping[str, Any]:
        return self._functions[self.name].get("parameters") or {}


class JsonCallPieces(CallPieces):
    """A call whose arguments are written in JSON, with *closing* and white space after them."""

    closing: ClassVar[str] = ""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(functions)
        self._json = JsonValue()
        self._after = ""

    @property
    def unread(self) -> str:
        return self._json.unread

    @property
    def is_over(self) -> bool:
        return self._json.is_whole

    def finish_arguments(self) -> str:
        piece = self._json.finish_value()
        self.is_broken |= self._json.is_broken
        return piece

    def _arguments(self, text: str) -> str:
        piece = self._json.push_text(text)
        self._after += "".join(self._json.after.split())
        self.is_broken = self._json.is_broken or not self.closing.startswith(self._after)
        return piece


class MemberCallPieces(CallPieces):
    """A call whose arguments are written one by one, each between tags."""

    def __init__(self, functions: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(functions)
        self._members = ObjectPieces()
        self._value: ValuePieces | None = None

    @property
    def unread(self) -> str:
        return "" if self._value is None else self._value.unread

    def finish_arguments(self) -> str:
        self.is_broken |= self._value is not None or not self.name
        return self._members.finish_object()

    def _grow(self, text: str) -> str:
        """Return what *text* adds to the open value."""
        if self._value is None:
            self.is_broken |= bool(text.strip())
            return ""
        piece = self._value.push_text(text)
        self.is_broken |= self._value.is_broken or bool(self._value.after.strip())
        return piece

    def _close(self) -> str:
        """End the open value, and return the rest of it."""
        value, self._value = self._value, None
        if value is None:
            self.is_broken = True
            return ""
        piece = value.finish_value()
        self.is_broken |= value.is_broken
        return piece


class Head:
    """The growing text before a call's arguments, up to what *pattern* matches."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._text = ""
        self.is_broken = False

    def push_text(self, text: str) -> re.Match[str] | None:
        """Take more text, and return the match once there is one."""
        self._text += text
        match = self._pattern.match(self._text)
        self.is_broken = match is None and len(self._text) > MAX_HEAD
        return match
