"""The few expressions of C++ in which test-chat.cpp writes its cases, read as data; nothing is compiled.

Literals, names, calls, lists in braces, and chains of methods. Strings next to one another are one string.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TOKEN = re.compile(
    r'(?P<raw>R"(?P<mark>[^()\\ ]{0,16})\((?P<body>.*?)\)(?P=mark)")'
    r'|(?P<text>"(?:\\.|[^"\\])*")'
    r"|(?P<space>\s+|//[^\n]*|/\*.*?\*/)"
    r"|(?P<name>[A-Za-z_][\w:]*)"
    r"|(?P<number>-?\d[\w.]*)"
    r"|(?P<sign>.)",
    re.DOTALL,
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}


@dataclass(frozen=True)
class Name:
    """A name that the file defines elsewhere."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call of a function, or of a method of what comes before it."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Token:
    """A token, its kind, and where it begins."""

    kind: str
    value: str
    start: int


class NotData(ValueError):
    """An expression that is none of the few."""


def tokenize(source: str, start: int = 0) -> Iterator[Token]:
    """Yield the tokens from *start* on, without comments."""
    for found in TOKEN.finditer(source, start):
        kind = found.lastgroup or ""
        if found["raw"] is not None:
            yield Token("text", found["body"], found.start())
        elif kind == "text":
            yield Token("text", unescape(found["text"][1:-1]), found.start())
        elif kind != "space":
            yield Token(kind, found[0], found.start())


def unescape(text: str) -> str:
    """The string of a literal's characters; its bytes are UTF-8."""
    if "\\" not in text:
        return text
    out = bytearray()
    for found in re.finditer(r"\\(x[0-9a-fA-F]+|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)|([^\\]+)", text, re.DOTALL):
        escape, plain = found[1], found[2]
        if plain is not None:
            out += plain.encode()
        elif escape[0] == "x":
            out.append(int(escape[1:], 16))
        elif escape[0] in "uU" and len(escape) > 1:
            out += chr(int(escape[1:], 16)).encode()
        else:
            out += ESCAPES.get(escape, escape).encode()
    return out.decode()


class Reader:
    """Reads expressions one after the other."""

    def __init__(self, source: str, start: int = 0) -> None:
        self._tokens = tokenize(source, start)
        self._next = next(self._tokens, None)

    def expression(self) -> Any:
        """Read a string, number, Name, Call or list. Raises NotData."""
        token = self._take()
        match token.kind, token.value:
            case "text", value:
                while self._next is not None and self._next.kind == "text":
                    value += self._take().value
                return value
            case "number", value:
                return value
            case "sign", "{":
                return self._list("}")
            case "name", ("true" | "false") as value:
                return value == "true"
            case "name", value if self._is("("):
                return Call(value, tuple(self._arguments()))
            case "name", value if self._is("{"):
                self._take()
                return self._list("}")
            case "name", value:
                return Name(value)
        raise NotData(f"{token.value!r} at {token.start}")

    def chain(self) -> list[Call]:
        """Read `(arguments).method(arguments)...`: the first call has no name. Raises NotData."""
        calls = [Call("", tuple(self._arguments()))]
        while self._is("."):
            self._take()
            calls.append(Call(self._take().value, tuple(self._arguments())))
        return calls

    def _arguments(self) -> list[Any]:
        if not self._is("("):
            raise NotData("no arguments")
        self._take()
        return self._list(")")

    def _list(self, end: str) -> list[Any]:
        found = []
        while not self._is(end):
            found.append(self.expression())
            if self._is(","):
                self._take()
            elif not self._is(end):
                raise NotData(f"{self._next} in a list")
        self._take()
        return found

    def _is(self, sign: str) -> bool:
        return self._next is not None and self._next.kind == "sign" and self._next.value == sign

    def _take(self) -> Token:
        token = self._next
        if token is None:
            raise NotData("the end")
        self._next = next(self._tokens, None)
        return token
