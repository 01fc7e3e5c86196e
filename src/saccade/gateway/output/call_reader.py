"""The base of all call readers: the calls and pieces that they yield, and the content around them."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from saccade.models.tool_formats import FORMATS
from saccade.models.tool_formats.call_pieces import CallPieces, Mark
from saccade.models.tool_formats.form import Declared, ToolCallTokens
from saccade.tokenization.messages import Tool
from saccade.tokenization.tokenizer import Tokenizer

Token = int | str
"""A token's id, or the text of a part of a token whose rest is a call's."""


def declared(tools: Sequence[Tool]) -> Declared:
    """Return the functions of *tools*, keyed by name."""
    return {tool["function"]["name"]: tool["function"] for tool in tools}


@dataclass(frozen=True)
class GeneratedCall:
    """Call number *index* of an answer, or a piece of it. The *arguments* of all pieces together are JSON text.

    The first piece *begins* the call, the last one *ends* it. If the call *is_cut*, its arguments are incomplete.
    """

    index: int
    id: str
    name: str
    arguments: str
    begins: bool = True
    ends: bool = True
    is_cut: bool = False


def joined_calls(pieces: Iterable[GeneratedCall]) -> list[GeneratedCall]:
    """Join *pieces* into whole calls, in order."""
    calls: list[GeneratedCall] = []
    texts: list[str] = []
    for piece in pieces:
        texts = [] if piece.begins else texts
        texts.append(piece.arguments)
        if piece.ends:
            calls.append(replace(piece, arguments="".join(texts), begins=True))
    return calls


Piece = Sequence[int] | str | GeneratedCall
"""Token ids of content, such a text of content, or a call or a piece of one."""


@dataclass(eq=False)
class CallReader(ABC):
    """Separates the calls of one answer from its content.

    - functions: the functions that the answer may call.
    - many: whether several calls are allowed; else the answer ends with its first call.
    - num_earlier: how many calls the chat already has.
    - separator: removes the white space around calls from the content.
    - is_cut: whether the answer ended within a call.
    """

    tokens: ToolCallTokens
    tokenizer: Tokenizer
    functions: Declared
    many: bool = True
    num_earlier: int = 0

    def __post_init__(self) -> None:
        self._format = FORMATS[self.tokens.format]
        self._marks = _marks(self.tokens)
        self._num_called = 0
        self.num_calls = 0
        self.is_cut = False
        self.separator = Separator()

    @property
    def is_full(self) -> bool:
        """Whether the answer already has the only call that it may make; later tokens are ignored."""
        return self.num_calls > 0 and not self.many

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """How many tokens are not content: tokens of calls and their sections, and buffered tokens."""

    def take_tokens(self, token_ids: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces in the new *token_ids*, which exclude the id that ended the answer."""
        content = list[int]()
        for token_id in token_ids:
            if self.is_full:
                break
            if self._is_content(token_id):
                content.append(token_id)
                continue
            yield content
            content = []
            yield from self._read_token(token_id)
        yield content

    @abstractmethod
    def _is_content(self, token_id: int) -> bool:
        """Return whether the next token neither belongs to a call nor begins one."""

    @abstractmethod
    def _read_token(self, token_id: int) -> Iterator[Piece]:
        """Yield the pieces in the next token, for which _is_content() is false."""

    @abstractmethod
    def finish_answer(self, is_cut: bool) -> Iterator[Piece]:
        """Yield the pieces in the buffered tokens at the end of the answer, which the token limit may have cut off."""

    def _generated(self, name: str, arguments: str, call_id: str | None) -> GeneratedCall:
        """Return the next call; *call_id* is the id that the model gave it, if any."""
        self.num_calls += 1
        number = self.num_earlier + self.num_calls - 1
        own_id = f"{name}_{number}" if self._format.numbers_calls else call_id
        return GeneratedCall(self.num_calls - 1, own_id or f"call_{secrets.token_hex(12)}", name, arguments)

    def _open(self) -> "OpenCall":
        """Return a new call, whose opening tag has just been read."""
        return OpenCall(self._format.pieces(self.functions), self._marks, self.tokenizer)


class OpenCall:
    """A call that is read while the model writes it, from the token after its opening tag."""

    def __init__(self, pieces: CallPieces, marks: Mapping[Token, Mark], tokenizer: Tokenizer) -> None:
        self.pieces = pieces
        self._marks = marks
        self._texts = tokenizer.stream(continues=True)

    def push_token(self, token: Token) -> str:
        """Take a token of the call, and return the next piece of the arguments."""
        mark = self._marks.get(token)
        if mark is not None:
            before = self._text(self._texts.finish_text())
            return before if self.pieces.is_broken else before + self.pieces.mark(mark)
        return self._text(self._texts.push_token(token) if isinstance(token, int) else token)

    def finish_call(self) -> str:
        """Return the last piece of the arguments, before the end tag."""
        before = self._text(self._texts.finish_text())
        return before if self.pieces.is_broken else before + self.pieces.finish_arguments()

    def _text(self, text: str) -> str:
        return self.pieces.text(text) if text and not self.pieces.is_broken else ""


def _marks(tokens: ToolCallTokens) -> dict[Token, Mark]:
    """Return the tags within calls, keyed by token id."""
    ids: dict[int | None, Mark] = {
        tokens.separator_id: "separator",
        tokens.key_begin_id: "key_begin",
        tokens.key_end_id: "key_end",
        tokens.value_begin_id: "value_begin",
        tokens.value_end_id: "value_end",
    }
    return {token_id: mark for token_id, mark in ids.items() if token_id is not None}


class Separator:
    """Omits white space around calls, which belongs to their format rather than the content."""

    def __init__(self) -> None:
        self._white_space = ""
        self._is_after_call = False

    def push_text(self, text: str) -> str:
        """Take more content; return it without its trailing white space, which may precede a call."""
        if self._is_after_call:
            text = text.lstrip()
            self._is_after_call = not text
        text = self._white_space + text
        content = text.rstrip()
        self._white_space = text[len(content) :]
        return content

    def call(self) -> None:
        """Note that a call begins after the content so far."""
        self._white_space = ""
        self._is_after_call = True

    def finish_content(self) -> str:
        """Return the white space at the end of the content."""
        white_space, self._white_space = self._white_space, ""
        return white_space
