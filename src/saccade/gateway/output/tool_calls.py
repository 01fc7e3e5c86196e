"""Separates tool calls from the content of an answer, by the token ids of the calls' tags.

Text that merely looks like a tag has other ids and opens nothing. The tokens of a call are buffered until its end tag;
then the format's function parses them together. So a call appears once it is complete and names one of the request's
tools, and a malformed one becomes content, including its tags. Arguments become JSON as chat templates write it in
later turns (json.dumps), so that the turn that a client sends back begins with the tokens that the model generated.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saccade.models.tool_formats import FORMATS
from saccade.models.tool_formats.form import Declared, ToolCallTokens
from saccade.tokenization.chat_template import Tool
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


Piece = Sequence[int] | GeneratedCall
"""Token ids of content, or a call."""


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
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._functions: Declared = declared(tools)
        self._format = FORMATS[tokens.format]
        self._num_earlier = num_earlier
        self._many = many
        self._pending: list[int] = []
        self._num_called = 0
        self._in_section = False
        self.num_calls = 0
        self.separator = Separator()

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
        call = self._format.parse([self._tokenizer.decode(part) for part in parts], self._functions)
        if call is None or before.strip():
            return self._release()
        self._in_section |= pending[0] == tokens.section_begin_id
        self._in_section &= pending[-1] != tokens.section_end_id
        self._num_called += len(pending)
        self._pending = []
        self.num_calls += 1
        number = self._num_earlier + self.num_calls - 1
        own_id = f"{call.name}_{number}" if self._format.numbers_calls else call.id
        call_id = own_id or f"call_{secrets.token_hex(12)}"
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
