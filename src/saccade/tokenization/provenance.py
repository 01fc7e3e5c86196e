"""Who wrote which character of a rendered prompt: the chat template or a user.

A template is a program, so positions cannot be computed; they are observed. The chat is rendered twice, once as it is
and once with the users' characters in disguise: exchanged one for one for private-use characters. Where the second
rendering, undisguised, equals the first, the template treated both alike, and every character out of disguise is the
template's own. Whatever a template does to text (trim, split, concatenate, replace), it cannot turn disguised
characters into a special token. Tags that a template looks for in text wear the disguise too (template_program.py).
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection

from saccade.errors import InvalidValue
from saccade.tokenization.picture_tag import PictureTag
from saccade.tokenization.tokenizer import Segment

PRIVATE_USE = range(0xF0000, 0xFFF00)
PIECE = 16 * 1024
"""Characters that are exchanged at a time."""

TAG_CHARACTERS = "<>/"
"""What templates look for in text, as in `</think>`; left visible where another character will do."""

Render = Callable[[Callable[[str], str]], str]
"""Renders a chat; every string that a user wrote is passed through the function given."""


class Provenance:
    """Splits rendered prompts at special tokens that the template wrote and at picture tags that the gateway wrote."""

    def __init__(self, special_tokens: Collection[str], picture_tag: PictureTag | None = None) -> None:
        tokens = sorted((token for token in special_tokens if token.strip()), key=len, reverse=True)
        patterns = [re.escape(token) for token in tokens]
        if picture_tag is not None and not any(token in picture_tag.form for token in tokens):
            patterns.append(picture_tag.pattern.pattern)
            tokens.append(picture_tag.fixed)
        self._special = re.compile(f"({'|'.join(patterns)})") if patterns else None
        everything = "".join(sorted({c for token in tokens for c in token if not c.isspace()}))
        self._disguised = (everything, critical_characters(tokens))

    def split(self, render: Render) -> list[Segment]:
        """Return the prompt in segments. Raises InvalidValue where template and text cannot be told apart."""
        plain = render(str)
        for characters in self._disguised:
            on, off = _disguise(characters)
            disguised = render(lambda text, on=on: _exchange(text, on))  # type: ignore[misc]
            if _exchange(disguised, off) == plain:
                return self._segments(disguised, off)
        raise InvalidValue(
            "This model's chat template gives a meaning to characters in the text that its special tokens are made of. "
            "Remove strings that look like special tokens from the messages.",
            "messages",
        )

    def _segments(self, disguised: str, off: dict[int, str]) -> list[Segment]:
        parts = self._special.split(disguised) if self._special else [disguised]
        return [
            Segment(_exchange(part, off), is_special=position % 2 == 1) for position, part in enumerate(parts) if part
        ]


def critical_characters(tokens: Collection[str]) -> str:
    """Return few characters such that every one of *tokens* holds at least one of them.

    Tokens that lack all of them cannot be formed. Letters and the characters of tags come last, since templates look
    for those in text.
    """
    chosen = ""
    left = [token for token in tokens if token.strip()]
    while left:
        counts = Counter(c for token in left for c in set(token) if not c.isspace())
        best = max(counts, key=lambda c: (c not in TAG_CHARACTERS and not c.isalnum(), not c.isalnum(), counts[c], c))
        chosen += best
        left = [token for token in left if best not in token]
    return chosen


def _exchange(text: str, table: dict[int, str]) -> str:
    # One call over a long text would keep every other thread waiting until it is done.
    return "".join(text[start : start + PIECE].translate(table) for start in range(0, len(text), PIECE))


def _disguise(characters: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the tables that put a disguise on and take it off; a random one, so that nobody can write in it."""
    base = PRIVATE_USE.start + secrets.randbelow(len(PRIVATE_USE) - len(characters))
    disguises = [chr(base + rank) for rank in range(len(characters))]
    on = {ord(character): disguise for character, disguise in zip(characters, disguises, strict=True)}
    off = {ord(disguise): character for character, disguise in zip(characters, disguises, strict=True)}
    return on, off
