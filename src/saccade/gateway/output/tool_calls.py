"""Separates tool calls from the content of an answer, by the token ids of the calls' tags.

Text that merely looks like a tag has other ids and opens nothing. The tokens of a call are buffered while the format's
scanner says that they may be one; at its end, the format's function parses them together. So a call appears once it is
complete and names one of the request's tools. If it turns out to be none, the first token becomes content, and the
others are read again: a call may begin in them. Arguments become JSON as chat templates write it in later turns
(json.dumps), so that the turn that a client sends back begins with the tokens that the model generated.
"""

import secrets
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from saccade.models.tool_formats import FORMATS
from saccade.models.tool_formats.call_scanner import CallScanner, Tag
from saccade.models.tool_formats.form import Declared, ParsedCall, ToolCallTokens
from saccade.tokenization.messages import Tool
from saccade.tokenization.tokenizer import Tokenizer


def declared(tools: Sequence[Tool]) -> Declared:
    """Return the functions of *tools* by name."""
    return {tool["function"]["name"]: tool["function"] for tool in tools}


@dataclass(frozen=True)
class GeneratedCall:
    """The call number *index* of an answer; *arguments* are a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str


Token = int | str
"""A token's id, or the text of a part of a token whose rest is a call's."""

Piece = Sequence[int] | str | GeneratedCall
"""Token ids of content, such a text of content, or a call."""

MAX_REREAD = 1 << 15
"""The most tokens of an answer that are read a second time; tags after them are text. So the time for an answer grows
with its length and not with the square."""


class ToolCallReader:
    """Separates the tokens of one answer. Unless *many* calls are allowed, the answer ends with its first call.

    The chat has *num_earlier* calls already. *num_tokens* counts the tokens that are not content: those of calls and
    their sections, and buffered ones. The text of the content goes through *separator*.
    """

    def __init__(
        self,
        tokens: ToolCallTokens,
        tokenizer: Tokenizer,
        tools: Sequence[Tool],
        many: bool = True,
        num_earlier: int = 0,
    ) -> None:
        self._tags = _tags(tokens)
        self._section_begin_id, self._section_end_id = tokens.section_begin_id, tokens.section_end_id
        self._tokenizer = tokenizer
        self._functions: Declared = declared(tools)
        self._format = FORMATS[tokens.format]
        self._num_earlier = num_earlier
        self._many = many
        self._pending: list[Token] = []
        self._scanner: CallScanner | None = None
        self._texts = tokenizer.stream()
        self._bytes_of, self._opening = tokenizer.bytes_of, self._format.opening[:1].encode()
        self._num_called = self._num_reread = 0
        self._in_section = False
        self.num_calls = 0
        self.separator = Separator()

    @property
    def is_full(self) -> bool:
        """Whether the answer has the one call that it may have; tokens after it are ignored."""
        return self.num_calls > 0 and not self._many

    @property
    def num_tokens(self) -> int:
        return self._num_called + _num_ids(self._pending)

    def take(self, token_ids: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces of new tokens, without the id that ended the answer."""
        content = list[int]()
        for token_id in token_ids:
            if self.is_full:
                break
            if self._scanner is None and token_id not in self._tags and not self._may_open(token_id):
                content.append(token_id)
                continue
            yield content
            content = []
            yield from self._read([token_id])
        yield content

    def finish(self) -> Iterator[Piece]:
        """Yield the pieces of the buffered tokens at the end of the answer: a call without its end tag, or content."""
        while self._scanner is not None:
            self._scanner.finish(self._texts.finish())
            others = yield from self._settle()
            yield from self._read(others)

    def _read(self, tokens: Sequence[Token]) -> Iterator[Piece]:
        """Yield the pieces of *tokens*, each of which may begin a call, belong to one, or be content."""
        waiting = list(reversed(tokens))
        while waiting and not self.is_full:
            token = waiting.pop()
            if self._scanner is None and not self._begins(token):
                if token == self._section_end_id and self._in_section:
                    self._in_section = False
                    self._num_called += 1
                else:
                    yield _piece(token)
                continue
            scanner = self._push(token)
            if scanner.is_broken or scanner.ending is not None:
                others = yield from self._settle()
                waiting += reversed(others)

    def _begins(self, token: Token) -> bool:
        """Return whether *token* may begin a call or a section."""
        is_begin = self._tags.get(token) in ("begin", "section_begin") or self._may_open(token)
        return is_begin and self._num_reread <= MAX_REREAD

    def _may_open(self, token: Token) -> bool:
        """Return whether the text that begins a call without its tag may begin in *token*."""
        if not self._opening:
            return False
        return self._opening in (token.encode() if isinstance(token, str) else self._bytes_of[token])

    def _push(self, token: Token) -> CallScanner:
        """Give *token* to the scanner, which is a new one for the first token of a call."""
        if self._scanner is None:
            self._scanner = self._format.scanner(self._functions.keys())
            self._texts = self._tokenizer.stream(continues=True)
        self._pending.append(token)
        tag = self._tags.get(token)
        before = "" if tag is None else self._texts.finish()
        self._scanner.push(self._texts.push(token) if isinstance(token, int) else token, tag, before)
        return self._scanner

    def _settle(self) -> Generator[Piece, None, list[Token]]:
        """Yield the pieces of the buffered tokens as far as they are certain. Return the others, to be read again."""
        pending, scanner = self._pending, self._scanner
        self._pending, self._scanner = [], None
        ending = None if scanner is None else scanner.ending
        call = None if scanner is None or ending is None else self._format.parse(scanner.parts, self._functions)
        if scanner is None or ending is None or (call is None and not scanner.is_empty):
            self._num_reread += len(pending)
            yield _piece(pending[0])
            return pending[1:]
        used, others = pending[: ending.last + 1], pending[ending.last + 1 :]
        self._num_reread += len(others)
        if scanner.before:
            # Alone, as a stop string in it ends the answer before the call.
            self._num_called += _num_ids(used[:1])
            yield scanner.before
        self._num_called += _num_ids(used[1:] if scanner.before else used)
        if used[0] == self._section_begin_id or self._tags.get(used[-1]) == "section_end":
            self._in_section = used[-1] != self._section_end_id
        if call is not None:
            yield self._generated(call)
        return [*filter(None, [ending.rest]), *others]

    def _generated(self, call: ParsedCall) -> GeneratedCall:
        self.num_calls += 1
        number = self._num_earlier + self.num_calls - 1
        own_id = f"{call.name}_{number}" if self._format.numbers_calls else call.id
        return GeneratedCall(self.num_calls - 1, own_id or f"call_{secrets.token_hex(12)}", call.name, call.arguments)


def _tags(tokens: ToolCallTokens) -> dict[Token, Tag]:
    """Return the ids of *tokens* that scanners know."""
    ids: dict[int | None, Tag] = {
        tokens.begin_id: "begin",
        tokens.end_id: "end",
        tokens.section_begin_id: "section_begin",
        tokens.section_end_id: "section_end",
        tokens.separator_id: "separator",
    }
    return {token_id: tag for token_id, tag in ids.items() if token_id is not None}


def _piece(token: Token) -> Piece:
    return [token] if isinstance(token, int) else token


def _num_ids(tokens: Sequence[Token]) -> int:
    return sum(isinstance(token, int) for token in tokens)


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
