"""Separates tool calls from the content of an answer, by the token ids of the calls' tags.

Text that merely looks like a tag has other ids and opens nothing. The tokens of a call are held until its end tag; what
they say is then read as a whole. So a call is shown once it is whole and valid, and a malformed one becomes content,
tags included, as if nothing had been held.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saccade.gateway.output.tool_calls.formats import FORMATS, Declared, declared
from saccade.grammars.tool_calls import ToolCallTokens
from saccade.tokenization.chat_template import Tool
from saccade.tokenization.tokenizer import Tokenizer


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
    """Separates the tokens of one answer. Where not *many* calls are allowed, the answer ends with its first one.

    *num_tokens* counts the tokens that are not content: those of calls and of their sections, and those held.
    """

    def __init__(self, tokens: ToolCallTokens, tokenizer: Tokenizer, tools: Sequence[Tool], many: bool = True) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._functions: Declared = declared(tools)
        self._parse = FORMATS[tokens.format]
        self._many = many
        self._held: list[int] = []
        self._num_called = 0
        self._in_section = False
        self.num_calls = 0

    @property
    def is_full(self) -> bool:
        """Whether the answer has the one call that it may have; tokens after it are ignored."""
        return self.num_calls > 0 and not self._many

    @property
    def num_tokens(self) -> int:
        return self._num_called + len(self._held)

    def take(self, token_ids: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces of new tokens, without the id that ended the answer."""
        tokens, content = self._tokens, list[int]()
        for token_id in token_ids:
            if self.is_full:
                break
            pieces: list[Piece] = []
            if token_id in (tokens.begin_id, tokens.section_begin_id):
                if self._held and (token_id != tokens.begin_id or tokens.begin_id in self._held):
                    pieces = [self._release()]
                self._held.append(token_id)
                self._in_section &= token_id == tokens.begin_id
            elif self._held:
                self._held.append(token_id)
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
        """Return what was held at the end of the answer: a call whose end tag is missing, or content."""
        return self._read() if self._held else []

    def _read(self) -> Piece:
        """Return the call in the held tokens; where they are none, the tokens themselves."""
        tokens, held = self._tokens, self._held
        if tokens.begin_id not in held:
            return self._release()
        start = held.index(tokens.begin_id)
        end = len(held) - (held[-1] in (tokens.end_id, tokens.section_end_id))
        parts: list[list[int]] = [[]]
        for token_id in held[start + 1 : end]:
            if token_id == tokens.separator_id:
                parts.append([])
            else:
                parts[-1].append(token_id)
        before = self._tokenizer.decode(held[int(held[0] == tokens.section_begin_id) : start])
        call = self._parse([self._tokenizer.decode(part) for part in parts], self._functions)
        if call is None or before.strip():
            return self._release()
        self._in_section |= held[0] == tokens.section_begin_id
        self._in_section &= held[-1] != tokens.section_end_id
        self._num_called += len(held)
        self._held = []
        self.num_calls += 1
        call_id = call.id or f"call_{uuid.uuid4().hex[:24]}"
        return GeneratedCall(self.num_calls - 1, call_id, call.name, call.arguments)

    def _release(self) -> list[int]:
        released, self._held = self._held, []
        return released


class Separator:
    """Omits the white space before, between and after calls, which belongs to their format and not to the content."""

    def __init__(self) -> None:
        self._held = ""
        self._is_after_call = False

    def push(self, text: str) -> str:
        """Take more content; return it up to its last white space, which may stand before a call."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return shown

    def call(self) -> None:
        """Note that a call follows the content so far."""
        self._held = ""
        self._is_after_call = True

    def finish(self) -> str:
        """Return the white space that ended the content."""
        held, self._held = self._held, ""
        return held
