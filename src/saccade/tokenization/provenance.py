"""Determine for each character of a rendered prompt whether it comes from the chat template or from a user.

A template is a program, so the positions of users' text cannot be computed. Instead the chat is rendered twice: once
unchanged, and once with critical characters of users replaced one for one by private-use characters (disguised). If the
second rendering equals the first after the replacement is undone, the template treated both texts alike, and every
critical character that is not disguised comes from the template. No operation on text (trim, split, concatenate,
replace) can turn disguised characters into a special token. Tags that a template searches in text are disguised too
(template_program.py).
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from saccade.errors import InvalidValue
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.tokenizer import Segment

PRIVATE_USE = range(0xF0000, 0xFFF00)
PIECE = 64 * 1024
"""How many characters are replaced in one call: a call over a long text would block all other threads."""

TAG_CHARACTERS = "<>/"
"""Characters that templates search in text, as in `</think>`; replaced only if a token has no other character."""

Exchanges = Sequence[tuple[str, str]]
"""Characters, and what each is replaced by; none of these is replaced itself."""

Render = Callable[[Callable[[str], str]], str]
"""Renders a chat; passes every string of a user through the given function."""


class Provenance:
    """Split rendered prompts at the template's special tokens and at the gateway's image tags."""

    def __init__(self, special_tokens: Collection[str], image_tag: ImageTag | None = None) -> None:
        tokens = sorted((token for token in special_tokens if token.strip()), key=len, reverse=True)
        patterns = [re.escape(token) for token in tokens]
        if image_tag is not None and not any(token in image_tag.form for token in tokens):
            patterns.append(image_tag.pattern.pattern)
            tokens.append(image_tag.fixed)
        self._special = re.compile(f"({'|'.join(patterns)})") if patterns else None
        everything = "".join(sorted({c for token in tokens for c in token if not c.isspace()}))
        self._disguised = (everything, critical_characters(tokens))

    def split(self, render: Render) -> list[Segment]:
        """Return the prompt in segments. Raises InvalidValue if template and text cannot be distinguished."""
        plain = render(str)
        for characters in self._disguised:
            on, off = _disguise(characters)
            try:
                disguised = render(lambda text, on=on: _exchange(text, on))  # type: ignore[misc]
            except InvalidValue:
                continue  # The template looks for words that are disguised, such as a schema's types.
            if _exchange(disguised, off) == plain:
                return self._segments(disguised, off)
        raise InvalidValue(
            "The model's chat template interprets characters of its special tokens in the messages' text. Remove "
            "strings that look like special tokens from the messages.",
            "messages",
        )

    def _segments(self, disguised: str, off: Exchanges) -> list[Segment]:
        parts = self._special.split(disguised) if self._special else [disguised]
        return [
            Segment(_exchange(part, off), is_special=position % 2 == 1) for position, part in enumerate(parts) if part
        ]


def critical_characters(tokens: Collection[str]) -> str:
    """Return a small set of characters of which every one of *tokens* contains at least one.

    A text without these characters cannot contain a token. Letters and the characters of tags are chosen last, because
    templates search for those in text.
    """
    chosen = ""
    left = [token for token in tokens if token.strip()]
    while left:
        counts = Counter(c for token in left for c in set(token) if not c.isspace())
        best = max(counts, key=lambda c: (c not in TAG_CHARACTERS and not c.isalnum(), not c.isalnum(), counts[c], c))
        chosen += best
        left = [token for token in left if best not in token]
    return chosen


def _exchange(text: str, exchanges: Exchanges) -> str:
    return "".join(_exchange_piece(text[start : start + PIECE], exchanges) for start in range(0, len(text), PIECE))


def _exchange_piece(piece: str, exchanges: Exchanges) -> str:
    # Five times as fast as str.translate().
    for old, new in exchanges:
        piece = piece.replace(old, new)
    return piece


def _disguise(characters: str) -> tuple[Exchanges, Exchanges]:
    """Return what disguises *characters* and what undoes it; random, so that users cannot guess the mapping."""
    base = PRIVATE_USE.start + secrets.randbelow(len(PRIVATE_USE) - len(characters))
    disguises = [chr(base + rank) for rank in range(len(characters))]
    return list(zip(characters, disguises, strict=True)), list(zip(disguises, characters, strict=True))
