"""Separates tool calls from an answer's content by the token ids of their tags.

Text that merely looks like a tag has other ids and opens no call. Tokens are buffered while the format's scanner says
that they may be a call; at the call's end, the format's function parses them together. So a call appears when it is
complete and names one of the request's tools. If the tokens turn out not to be a call, the first becomes content. The
others are read again, since a call may begin in them. If the token limit cuts off a call of a declared function, the
part of the call that is certain is sent. Arguments become JSON as chat templates write it in later turns (json.dumps).
So the turn that a client sends back begins with the tokens that the model generated.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace

from saccade.gateway.output.call_reader import CallReader, GeneratedCall, Piece, Token
from saccade.models.tool_formats.call_scanner import CallScanner, Tag
from saccade.models.tool_formats.form import ToolCallTokens

MAX_REREAD = 1 << 15
"""The most tokens of an answer that are read a second time; tags after them are text. So the time for an answer grows
with its length and not with the square."""


class ToolCallReader(CallReader):
    """Reads possible calls: text that begins like a call may turn out to be content."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = self.tokens
        self._tags = _tags(tokens)
        self._section_begin_id, self._section_end_id = tokens.section_begin_id, tokens.section_end_id
        self._pending: list[Token] = []
        self._scanner: CallScanner | None = None
        self._texts = self.tokenizer.stream()
        self._bytes_of, self._opening = self.tokenizer.bytes_of, self._format.opening[:1].encode()
        self._num_reread = 0
        self._in_section = False

    @property
    def num_tokens(self) -> int:
        return self._num_called + _num_ids(self._pending)

    def _is_content(self, token_id: int) -> bool:
        return self._scanner is None and token_id not in self._tags and not self._may_open(token_id)

    def _read_token(self, token_id: int) -> Iterator[Piece]:
        yield from self._read([token_id])

    def finish_answer(self, is_cut: bool) -> Iterator[Piece]:
        while self._scanner is not None:
            if is_cut and (call := self._cut_call()) is not None:
                self._num_called += _num_ids(self._pending)
                self._pending, self._scanner = [], None
                yield call
                return
            self._scanner.finish_answer(self._texts.finish_text())
            others = yield from self._settle()
            yield from self._read(others)

    def _read(self, tokens: Sequence[Token]) -> Iterator[Piece]:
        """Yield the pieces in *tokens*. Each token may begin a call, belong to one, or be content."""
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
        """Give *token* to the scanner; the first token of a call gets a new scanner."""
        if self._scanner is None:
            self._scanner = self._format.scanner(self.functions.keys())
            self._texts = self.tokenizer.stream(continues=True)
        self._pending.append(token)
        tag = self._tags.get(token)
        before = "" if tag is None else self._texts.finish_text()
        self._scanner.push_token(self._texts.push_token(token) if isinstance(token, int) else token, tag, before)
        return self._scanner

    def _cut_call(self) -> GeneratedCall | None:
        """Return the call that the buffered tokens begin, or None if that is uncertain.

        It is certain if they begin with a tag and then name a declared function. Without a tag, the text may be an
        example of a call.
        """
        first, *others = self._pending
        if first not in self._tags:
            return None
        if first == self._section_begin_id and others and self._tags.get(others[0]) == "begin":
            others = others[1:]
        call = self._open()
        arguments = "".join(map(call.push_token, others))
        is_over = call.pieces.is_over
        arguments += call.finish_call() if is_over else ""
        if not call.pieces.name or call.pieces.is_broken:
            return None
        self.is_cut = not is_over
        return replace(self._generated(call.pieces.name, arguments, call.pieces.id), is_cut=self.is_cut)

    def _settle(self) -> Generator[Piece, None, list[Token]]:
        """Yield the pieces in the buffered tokens that are certain. Return the other tokens, to be read again."""
        pending, scanner = self._pending, self._scanner
        self._pending, self._scanner = [], None
        ending = None if scanner is None else scanner.ending
        call = None if scanner is None or ending is None else self._format.parse(scanner.parts, self.functions)
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
            yield self._generated(call.name, call.arguments, call.id)
        return [*filter(None, [ending.rest]), *others]


def _tags(tokens: ToolCallTokens) -> dict[Token, Tag]:
    """Return the tags that scanners know, keyed by token id."""
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
