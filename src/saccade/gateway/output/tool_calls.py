"""Separates tool calls from the content of an answer, by the token ids of the calls' tags.

Text that merely looks like a tag has other ids and opens nothing. The tokens of a call are buffered until its end tag;
then the format's function parses them together. So a call appears once it is complete and names one of the request's
tools, and a malformed one becomes content, including its tags. Arguments become JSON as chat templates write it in
later turns (json.dumps), so that the turn that a client sends back begins with the tokens that the model generated.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from saccade.grammars.property_types import typed
from saccade.grammars.tool_calls import ToolCallTokens
from saccade.models.family import ToolFormat
from saccade.tokenization.chat_template import Tool
from saccade.tokenization.tokenizer import Tokenizer

FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
_KIMI_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


@dataclass(frozen=True)
class ParsedCall:
    """A call of the tool *name*; *arguments* are a JSON object as text. *id* is the model's own, if it writes one."""

    name: str
    arguments: str
    id: str | None = None


Declared = Mapping[str, Mapping[str, Any]]
"""The request's functions by name."""

Parse = Callable[[Sequence[str], Declared], ParsedCall | None]


def declared(tools: Sequence[Tool]) -> Declared:
    """Return the functions of *tools* by name."""
    return {tool["function"]["name"]: tool["function"] for tool in tools}


def parse_hermes(parts: Sequence[str], functions: Declared) -> ParsedCall | None:
    """Parse `{"name": ..., "arguments": {...}}`."""
    match _json("".join(parts)):
        case {"name": str(name), "arguments": dict(arguments)} if name in functions:
            return ParsedCall(name, _to_json(arguments))
    return None


def parse_qwen3_coder(parts: Sequence[str], functions: Declared) -> ParsedCall | None:
    """Parse `<function=NAME>`, for each argument `<parameter=NAME>` value `</parameter>`, `</function>`.

    One line break after a parameter's tag and one before its end do not belong to the value. The function's schema
    determines the type of the value.
    """
    text = "".join(parts).strip()
    name, bracket, rest = text.removeprefix(FUNCTION).partition(">")
    if not text.startswith(FUNCTION) or not bracket or name not in functions or not rest.endswith(END_FUNCTION):
        return None
    schema = functions[name].get("parameters") or {}
    values = _parameters(rest.removesuffix(END_FUNCTION))
    if values is None:
        return None
    return ParsedCall(name, _to_json({key: typed(value, key, schema) for key, value in values.items()}))


def parse_kimi_k2(parts: Sequence[str], functions: Declared) -> ParsedCall | None:
    """Parse `functions.NAME:INDEX`, which is also the call's id, and the arguments after the separator."""
    if len(parts) != 2:
        return None
    call_id, arguments = parts[0].strip(), _json(parts[1])
    named = _KIMI_ID.fullmatch(call_id)
    if named is None or named["name"] not in functions or not isinstance(arguments, dict):
        return None
    return ParsedCall(named["name"], _to_json(arguments), call_id)


FORMATS: Final[Mapping[ToolFormat, Parse]] = {
    "hermes": parse_hermes,
    "qwen3_coder": parse_qwen3_coder,
    "kimi_k2": parse_kimi_k2,
}


def _parameters(text: str) -> dict[str, str] | None:
    """Return the values by name. A value ends at the first end tag that another parameter or nothing follows."""
    parameters: dict[str, str] = {}
    text = text.strip()
    while text:
        name, bracket, rest = text.removeprefix(PARAMETER).partition(">")
        if not text.startswith(PARAMETER) or not bracket:
            return None
        end = rest.find(END_PARAMETER)
        while end >= 0:
            after = rest[end + len(END_PARAMETER) :].lstrip()
            if not after or after.startswith(PARAMETER):
                break
            end = rest.find(END_PARAMETER, end + 1)
        else:
            return None
        parameters[name] = rest[:end].removeprefix("\n").removesuffix("\n")
        text = after
    return parameters


def _json(text: str) -> Any:
    """Return the JSON value in *text*, None if it is not valid JSON."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _to_json(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True)
class GeneratedCall:
    """The call number *index* of an answer; *arguments* are a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str


Piece = Sequence[int] | GeneratedCall
"""Token ids of content, or a call."""


class ToolCallReader:
    """Separates the tokens of one answer. Unless *many* calls are allowed, the answer ends with its first call.

    *num_tokens* counts the tokens that are not content: those of calls and their sections, and buffered ones.
    """

    def __init__(self, tokens: ToolCallTokens, tokenizer: Tokenizer, tools: Sequence[Tool], many: bool = True) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._functions: Declared = declared(tools)
        self._parse = FORMATS[tokens.format]
        self._many = many
        self._pending: list[int] = []
        self._num_called = 0
        self._in_section = False
        self.num_calls = 0

    @property
    def is_full(self) -> bool:
        """Whether the answer has the one call that it may have; tokens after it are ignored."""
        return self.num_calls > 0 and not self._many

    @property
    def num_tokens(self) -> int:
        return self._num_called + len(self._pending)

    def take(self, token_ids: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces of new tokens, without the id that ended the answer."""
        tokens, content = self._tokens, list[int]()
        for token_id in token_ids:
            if self.is_full:
                break
            pieces: list[Piece] = []
            if token_id in (tokens.begin_id, tokens.section_begin_id):
                if self._pending and (token_id != tokens.begin_id or tokens.begin_id in self._pending):
                    pieces = [self._release()]
                self._pending.append(token_id)
                self._in_section &= token_id == tokens.begin_id
            elif self._pending:
                self._pending.append(token_id)
                if token_id in (tokens.end_id, tokens.section_end_id):
                    pieces = [self._read()]
            elif token_id == tokens.section_end_id and self._in_section:
                self._in_section = False
                self._num_called += 1
            else:
                content.append(token_id)
            if pieces:
                yield content
                yield from pieces
                content = []
        yield content

    def finish(self) -> Piece:
        """Return the buffered tokens at the end of the answer: a call without its end tag, or content."""
        return self._read() if self._pending else []

    def _read(self) -> Piece:
        """Return the call in the buffered tokens, or the tokens themselves if they are no call."""
        tokens, pending = self._tokens, self._pending
        if tokens.begin_id not in pending:
            return self._release()
        start = pending.index(tokens.begin_id)
        end = len(pending) - (pending[-1] in (tokens.end_id, tokens.section_end_id))
        parts: list[list[int]] = [[]]
        for token_id in pending[start + 1 : end]:
            if token_id == tokens.separator_id:
                parts.append([])
            else:
                parts[-1].append(token_id)
        before = self._tokenizer.decode(pending[int(pending[0] == tokens.section_begin_id) : start])
        call = self._parse([self._tokenizer.decode(part) for part in parts], self._functions)
        if call is None or before.strip():
            return self._release()
        self._in_section |= pending[0] == tokens.section_begin_id
        self._in_section &= pending[-1] != tokens.section_end_id
        self._num_called += len(pending)
        self._pending = []
        self.num_calls += 1
        call_id = call.id or f"call_{secrets.token_hex(12)}"
        return GeneratedCall(self.num_calls - 1, call_id, call.name, call.arguments)

    def _release(self) -> list[int]:
        released, self._pending = self._pending, []
        return released


class Separator:
    """Omits the white space before, between and after calls, which is part of their format and not of the content."""

    def __init__(self) -> None:
        self._white_space = ""
        self._is_after_call = False

    def push(self, text: str) -> str:
        """Take more content; return it without its trailing white space, which may precede a call."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        text = self._white_space + text
        content = text.rstrip()
        self._white_space = text[len(content) :]
        return content

    def call(self) -> None:
        """Begin a call after the content so far."""
        self._white_space = ""
        self._is_after_call = True

    def finish(self) -> str:
        """Return the white space at the end of the content."""
        white_space, self._white_space = self._white_space, ""
        return white_space
