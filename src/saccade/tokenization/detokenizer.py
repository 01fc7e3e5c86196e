"""Turns token ids into text, one delta at a time, with the same result as for the whole sequence at once.

Text is held back while its last character is incomplete, and while its last characters may still become a stop string.
Both checks take constant time per byte, however the text is split into tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from saccade.tokenization.tokenizer import Tokenizer


class StopString:
    """A stop string's text, and its prefix function as far as any answer to the request has needed it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_prepared = 0
        """Characters whose prefixes are known: no more than the longest match so far."""

        self._lengths: list[int] = []

    def fallback(self, num_matched: int) -> int:
        """Return the length of the longest border of the first *num_matched* characters.

        A border is a proper prefix that is also a suffix.
        """
        while self.num_prepared < num_matched:
            self._lengths.append(self._next_length())
            self.num_prepared += 1
        return self._lengths[num_matched - 1]

    def _next_length(self) -> int:
        if not self._lengths:
            return 0
        length, character = self._lengths[-1], self.text[self.num_prepared]
        while length and self.text[length] != character:
            length = self._lengths[length - 1]
        return length + (self.text[length] == character)


class StopMatch:
    """Matches a growing text against one stop string (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: StopString) -> None:
        self.text = stop.text
        self.num_matched = 0
        self._stop = stop

    def advance(self, character: str) -> bool:
        """Take the next character; return whether it completes the stop string. The search then goes on."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._stop.fallback(self.num_matched)
        self.num_matched += self.text[self.num_matched] == character
        is_complete = self.num_matched == len(self.text)
        if is_complete:
            self.num_matched = self._stop.fallback(self.num_matched)
        return is_complete


@dataclass(frozen=True)
class TextRules:
    """Rules for which part of an answer is shown.

    - stop: strings that end the answer, once it has more than *min_tokens* tokens.
    - shows_stop: whether the stop string itself is shown.
    - shows_special: whether special tokens are shown.
    """

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    shows_stop: bool = False
    shows_special: bool = False

    @cached_property
    def stop_strings(self) -> tuple[StopString, ...]:
        """The StopStrings of *stop*.

        All answers with these rules share them, since each one grows as answers match it.
        """
        return tuple(map(StopString, self.stop))


PLAIN = TextRules()


class Detokenizer:
    """The growing text of one answer. It ends at the first complete stop string or, in a tie, at the longest.

    *num_tokens* counts this text's tokens, and *num_others* the answer's tokens that do not belong to the text. The
    text may *continue* the prompt's text.
    """

    def __init__(self, tokenizer: Tokenizer, rules: TextRules = PLAIN, *, continues: bool = False) -> None:
        self._hidden_ids, self._num_known = tokenizer.hidden_ids, tokenizer.num_tokens
        self._stream = tokenizer.stream(continues=continues)
        self.rules = rules
        self._stops = [StopMatch(stop) for stop in rules.stop_strings]
        self._pending = ""
        self.stop: str | None = None
        """The stop string that ended the text."""

        self.num_tokens = 0
        self.num_others = 0

    def push_tokens(self, token_ids: Iterable[int]) -> str:
        """Take more tokens and return the text that is now final. After a stop string, tokens are ignored."""
        text = ""
        for token_id in token_ids:
            if self.stop is not None:
                break
            self.num_tokens += 1
            is_known = 0 <= token_id < self._num_known
            if self.rules.shows_special or (is_known and token_id not in self._hidden_ids):
                text += self._release(self._stream.push_token(token_id))
        return text

    def push_text(self, text: str) -> str:
        """Like push_tokens(), but for text from part of a token, which does not count as a token."""
        return "" if self.stop is not None else self._release(self._stream.finish_text() + text)

    def finish_text(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        if self.stop is not None:
            return ""
        text = self._release(self._stream.finish_text()) + self._pending
        self._pending = ""
        return text if self.stop is None else ""

    def _release(self, text: str) -> str:
        if not self._stops:
            return text
        pending = self._pending + text
        for position, character in enumerate(text, start=len(self._pending) + 1):
            complete = [stop.text for stop in self._stops if stop.advance(character)]
            if complete and self.num_tokens + self.num_others > self.rules.min_tokens:
                self.stop = max(complete, key=len)
                self._pending = ""
                return pending[: position if self.rules.shows_stop else position - len(self.stop)]
        certain = len(pending) - max(stop.num_matched for stop in self._stops)
        self._pending = pending[certain:]
        return pending[:certain]
