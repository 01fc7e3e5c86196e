"""Separates an answer's reasoning from its content, by token ids.

Reasoning models write `<think> reasoning </think> content`, or their chat template writes the first marker. Both are
looked for as token ids, so that no text is taken for a marker. Reasoning and content are detokenised separately: no
character spans both, and a stream has the same text as a whole answer. Line breaks around the markers are kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

from saccade.gateway.served_models.served_model import ReasoningTokens
from saccade.tokenization.detokenizer import PLAIN, Detokenizer, TextRules
from saccade.tokenization.tokenizer import Tokenizer


class Taken(NamedTuple):
    """New tokens, separated: the text of the reasoning, and the ids that belong to the content."""

    reasoning: str
    content_ids: Sequence[int]


class Reasoning:
    """Separates the tokens of one answer. The first end marker closes the reasoning; later markers are content.

    Where the reasoning is not *shown*, its tokens are still counted. *rules* are those of its text.
    """

    def __init__(
        self, markers: ReasoningTokens, tokenizer: Tokenizer, shown: bool = True, rules: TextRules = PLAIN
    ) -> None:
        self._markers = markers
        self._detokenizer = Detokenizer(tokenizer, rules)
        self._shown = shown
        self._is_first = True
        self.is_open = False
        self.num_markers = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of reasoning so far, markers not counted."""
        return self._detokenizer.num_tokens

    def begin(self, prompt: Sequence[int]) -> None:
        """Note the token ids of the prompt, which may end within reasoning."""
        self.is_open = self._markers.opened_by(prompt)

    def take(self, token_ids: Sequence[int]) -> Taken:
        """Separate new tokens of the answer, without the id that ended it."""
        if self._is_first and token_ids:
            self._is_first = False
            if token_ids[0] == self._markers.start_id:
                self.is_open = True
                self.num_markers += 1
                token_ids = token_ids[1:]
        if not self.is_open:
            return Taken("", token_ids)
        if self._markers.end_id not in token_ids:
            return Taken(self._show(self._detokenizer.push(token_ids)), ())
        border = token_ids.index(self._markers.end_id)
        self.is_open = False
        self.num_markers += 1
        text = self._detokenizer.push(token_ids[:border]) + self._detokenizer.finish()
        return Taken(self._show(text), token_ids[border + 1 :])

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        return self._show(self._detokenizer.finish()) if self.is_open else ""

    def _show(self, text: str) -> str:
        return text if self._shown else ""
