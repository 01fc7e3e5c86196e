"""Reads calls that a grammar constrains, and yields their arguments in pieces while the model writes them.

The grammar allows a call's tags in calls and nowhere else. So the first tag certainly begins a call, and the next end
tag ends it. Only the text before the function's name has to be buffered.
"""

from collections.abc import Iterator
from dataclasses import replace

from saccade.gateway.output.call_reader import CallReader, GeneratedCall, OpenCall, Piece


class HeldCallReader(CallReader):
    """Reads calls in the exact form of their grammar.

    If a worker breaks the form, text that is not yet an argument becomes content.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begin_id, self._end_id = self.tokens.begin_id, self.tokens.end_id
        self._section_ids = {self.tokens.section_begin_id, self.tokens.section_end_id}
        self._open_call: OpenCall | None = None
        self._announced: GeneratedCall | None = None
        self._pending: list[int] = []
        """The tokens of the open call before its name is known."""

    @property
    def is_full(self) -> bool:
        return super().is_full and self._announced is None

    @property
    def num_tokens(self) -> int:
        return self._num_called + len(self._pending)

    def _is_content(self, token_id: int) -> bool:
        return self._open_call is None and token_id != self._begin_id and token_id not in self._section_ids

    def _read_token(self, token_id: int) -> Iterator[Piece]:
        if self._open_call is not None:
            yield from self._push(self._open_call, token_id)
        elif token_id == self._begin_id:
            self._open_call, self._pending = self._open(), [token_id]
        else:
            self._num_called += 1

    def finish_answer(self, is_cut: bool) -> Iterator[Piece]:
        if self._open_call is None:
            return
        is_over = self._open_call.pieces.is_over
        rest = self._open_call.finish_call() if is_over else ""
        self.is_cut = not is_over
        yield from self._end(rest, self.is_cut)

    def _push(self, call: OpenCall, token_id: int) -> Iterator[Piece]:
        """Yield the pieces that a token adds to the open *call*."""
        is_end, unread = token_id == self._end_id, call.pieces.unread
        text = call.finish_call() if is_end else call.push_token(token_id)
        if call.pieces.is_broken:
            yield from self._break(call, unread, token_id)
            return
        if self._announced is None:
            self._pending.append(token_id)
            if call.pieces.name:
                yield self._announce(call)
        else:
            self._num_called += 1
        if self._announced is not None and text and not is_end:
            yield replace(self._announced, arguments=text, begins=False, ends=False)
        if is_end:
            self.is_cut = False
            yield from self._end(text, self.is_cut)

    def _break(self, call: OpenCall, unread: str, token_id: int) -> Iterator[Piece]:
        """End the open *call* at a token that breaks its form.

        *unread* is the text before that token that is not yet an argument.
        """
        if self._announced is None:
            self._pending.append(token_id)
            yield from self._end("", is_cut=True)
            return
        is_over = call.pieces.is_over
        self.is_cut = not is_over
        yield from self._end(call.pieces.finish_arguments() if is_over else "", self.is_cut)
        yield unread
        if token_id == self._end_id:
            self._num_called += 1
        else:
            yield [token_id]

    def _announce(self, call: OpenCall) -> GeneratedCall:
        """Return the first piece of *call*, whose name is now known."""
        self._num_called += len(self._pending)
        self._pending = []
        self._announced = replace(self._generated(call.pieces.name, "", call.pieces.id), ends=False)
        return self._announced

    def _end(self, rest: str, is_cut: bool) -> Iterator[Piece]:
        """End the open call with the *rest* of its arguments; a call that has no name yet becomes content."""
        announced, pending = self._announced, self._pending
        self._open_call, self._announced, self._pending = None, None, []
        if announced is None:
            yield pending
        else:
            yield replace(announced, arguments=rest, begins=False, is_cut=is_cut, ends=True)
