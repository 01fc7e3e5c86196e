"""Separates an answer's reasoning from its content.

Reasoning models write `<think> reasoning </think> content`, or their chat template writes the first marker. Markers are
recognised by their token ids, so that no ordinary text is mistaken for a marker. Reasoning and content are detokenised
separately, so no character spans both, and a streamed answer has the same text as a whole one. Line breaks around the
markers are kept.
"""

from collections.abc import Sequence

from saccade.gateway.served_models.served_model import ReasoningTokens
from saccade.tokenization.detokenizer import PLAIN, Detokenizer, TextRules
from saccade.tokenization.tokenizer import Tokenizer


class Reasoning:
    """Separates the reasoning tokens of one answer from the rest. The first end marker closes the reasoning.

    Later end markers are left out, unless a start marker in the content precedes them. Reasoning tokens count even if
    they are not shown. *rules* apply to the reasoning's text. *prompt* holds the prompt's token ids, which may end
    within reasoning.
    """

    def __init__(
        self,
        markers: ReasoningTokens,
        tokenizer: Tokenizer,
        is_shown: bool = True,
        rules: TextRules = PLAIN,
        prompt: Sequence[int] = (),
    ) -> None:
        self._markers = markers
        self._start_id, self._end_id = markers.start_id, markers.end_id
        self._detokenizer = Detokenizer(tokenizer, rules)
        self._is_shown = is_shown
        self._is_first = True
        self._header, self._seen = markers.header, ""
        self._num_started = 0
        """Start markers of the content that no end marker followed."""

        self.is_open = markers.opened_by(prompt)
        self.num_markers = 0

    @property
    def num_tokens(self) -> int:
        """The number of reasoning tokens so far, without markers."""
        return self._detokenizer.num_tokens

    @property
    def may_follow(self) -> bool:
        """Whether the next token may belong to the reasoning."""
        return self.is_open or self._is_first

    def take_tokens(self, token_ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Return the text that new tokens add to the reasoning, and the ids among them that belong to the content.

        The new tokens exclude the id that ended the answer.
        """
        if self._is_first and token_ids:
            self._is_first = False
            if token_ids[0] == self._start_id:
                self.is_open = True
                self.num_markers += 1
                token_ids = token_ids[1:]
        if self._end_id in token_ids or self._start_id in token_ids:
            return self._take_markers(token_ids)
        if not self.is_open:
            return "", token_ids
        return self._show(self._detokenizer.push_tokens(token_ids)), ()

    def take_text(self, text: str) -> tuple[str, str]:
        """Return what *text*, which is part of a token, adds to the reasoning's text and to the content's."""
        return (self._show(self._detokenizer.push_text(text)), "") if self.is_open else ("", text)

    def end_reasoning(self) -> str:
        """End the reasoning, if it is open, because something else follows. Return the rest of its text."""
        self._is_first = False
        text = self.finish_answer()
        self.is_open = False
        return text

    def finish_answer(self) -> str:
        """Return the rest of the reasoning's text at the end of the answer."""
        return self._show(self._detokenizer.finish_text(), is_last=True) if self.is_open else ""

    def _take_markers(self, token_ids: Sequence[int]) -> tuple[str, Sequence[int]]:
        text, content = "", list[int]()
        for token_id in token_ids:
            if self.is_open and token_id != self._end_id:
                text += self._show(self._detokenizer.push_tokens([token_id]))
            elif self.is_open or (token_id == self._end_id and not self._num_started):
                text += self.end_reasoning()
                self.num_markers += 1
            elif token_id == self._start_id and self._markers.header:
                # Its header tells another block of reasoning from a marker that is mentioned.
                self.is_open = True
                self._header, self._seen = self._markers.header, ""
                self.num_markers += 1
            else:
                self._num_started += (token_id == self._start_id) - (token_id == self._end_id)
                content.append(token_id)
        return text, content

    def _show(self, text: str, *, is_last: bool = False) -> str:
        """Return the part of *text* to show, without the header, which may arrive in several parts."""
        self._seen += text
        if is_last and self._seen == self._header.rstrip():
            self._seen = self._header
        if self._header.startswith(self._seen) and not is_last:
            return ""
        visible, self._seen, self._header = self._seen.removeprefix(self._header), "", ""
        return visible if self._is_shown else ""
