"""An answer's reasoning, told from its content by token ids.

Models that think write `<think> reasoning </think> content`, or their chat template writes the first marker. Both are
looked for as token ids, so that no text, whoever wrote it, is taken for a marker. Reasoning and content are detokenised
each by itself: no character spans the border, and a stream shows what a whole answer does. Line breaks at the border
are kept as the model wrote them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saccade.tokenization.detokenizer import PLAIN, Detokenizer, TextRules
from saccade.tokenization.tokenizer import Tokenizer

START = "<think>"
END = "</think>"

OPENING_TOKENS = 2
"""A template that opens the reasoning ends in the marker, or in the marker and a line break."""


@dataclass(frozen=True)
class ReasoningTokens:
    """The token ids that enclose reasoning in one model's answers."""

    start_id: int
    end_id: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ReasoningTokens | None":
        """Return the markers of a model, None where it has none."""
        start_id, end_id = tokenizer.token_id(START), tokenizer.token_id(END)
        return None if start_id is None or end_id is None else cls(start_id, end_id)

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Tell whether the token ids *prompt* end within reasoning, where the answer goes on."""
        last = list(prompt[-OPENING_TOKENS:])
        return self.start_id in last and self.end_id not in last[last.index(self.start_id) :]


class Taken(NamedTuple):
    """New tokens, taken apart: the text of those that reason, and the ids that belong to the content."""

    reasoning: str
    content_ids: Sequence[int]


class Reasoning:
    """Follows one answer. The first end marker closes the reasoning; markers after it are content.

    Where the reasoning is not *shown*, its tokens are taken and counted all the same. *rules* are those of its text.
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
        """Note the token ids of the prompt that the answer follows."""
        self.is_open = self._markers.opened_by(prompt)

    def take(self, token_ids: Sequence[int]) -> Taken:
        """Take new tokens of the answer, the id that ended it left out."""
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
        """Return the text that was held back; the answer is over."""
        return self._show(self._detokenizer.finish()) if self.is_open else ""

    def _show(self, text: str) -> str:
        return text if self._shown else ""
