"""Separates a chat template's text in a rendered prompt from the users' text.

A template is a program, so the positions of users' text cannot be computed. Instead, the chat is rendered twice, once
unchanged and once in disguise. The disguise replaces characters of special tokens in users' text, one for one, with
letters of an extinct script. If the second rendering equals the first after the replacement is undone, the template
treated both texts alike. Every such character that is not disguised then comes from the template. No text operation
(trim, split, concatenate, replace) can turn disguised characters into a special token. Tags that a template searches
for in text are disguised too (template_program.py).

The words that a template looks for, such as a schema's `enum`, are not disguised unless they may be part of a token in
the prompt. If a template looks for anything else in the text, a special token must survive two weaker disguises. One
disguises a few of its characters in all texts. The other disguises all its characters, but only in texts that may be
part of it. If the template writes keys as tags, a schema's key `think` is such a text.
"""

import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property
from itertools import chain, islice

from saccade.errors import InvalidValue
from saccade.tokenization.image_tag import ImageTag
from saccade.tokenization.tokenizer import Segment

TANGUT = range(0x17000, 0x187F8)
"""Letters without case that nobody types. Python's repr(), which templates apply to lists, leaves them as they are."""

PIECE = 64 * 1024
"""How many characters are replaced in one call: a call over a long text would block all other threads."""

TAG_CHARACTERS = "<>/"
"""Characters that templates search in text, as in `</think>`; replaced only if a token has no other character."""

OTHER_CASES = "\u0130\u0131\u017f\u212a"
"""Characters outside ASCII that are i, s and k in another case."""

Exchanges = Mapping[str, str]
"""Characters, and what each is replaced by; none of these is replaced itself."""

Leaves = Callable[[str], bool]
"""Whether a text is left without disguise."""


Spans = set[tuple[int, int]]
"""The places of special tokens in a prompt."""


def _nothing(text: str) -> bool:
    return False


class Disguise:
    """Replaces *characters* in texts, except those that it *leaves* alone, and in tags that a template searches for.

    The replacements are random, so that users cannot guess them, and are not in *plain*, the text without disguise.
    """

    def __init__(
        self, characters: str = "", leaves: Leaves = _nothing, leaves_searched: bool = False, plain: str = ""
    ) -> None:
        replacements = _replacements(len(characters), plain)
        self._on = dict(zip(characters, replacements, strict=True))
        self._off = dict(zip(replacements, characters, strict=True))
        self._leaves = leaves
        self._leaves_searched = leaves_searched

    def __call__(self, text: str) -> str:
        """Return a user's *text* in disguise."""
        return text if self._leaves(text) else _exchange(text, self._on)

    def searched(self, tag: str) -> str:
        """Return *tag* in the form in which a template finds it in users' text."""
        return tag if self._leaves_searched else _exchange(tag, self._on)

    def undo(self, text: str) -> str:
        """Return *text* without disguise."""
        return _exchange(text, self._off)

    def in_case(self, text: str, change: Callable[[str], str]) -> str:
        """Return *text* with its case changed by *change*; a letter's disguise becomes that of its other case."""
        other_cases = {old: self._on.get(change(letter), old) for letter, old in self._on.items()}
        return _exchange(change(text), {old: new for old, new in other_cases.items() if new != old})


def _replacements(count: int, plain: str) -> list[str]:
    """Return *count* letters from a random start, none of which is in *plain* if there are enough others."""
    start = secrets.randbelow(len(TANGUT))
    letters = chain(TANGUT[start:], TANGUT[:start])
    used = frozenset[str]() if plain.isascii() else frozenset(plain)
    unused = list(islice((letter for letter in map(chr, letters) if letter not in used), count))
    return unused if len(unused) == count else list(map(chr, TANGUT[:count]))


Render = Callable[[Disguise], str]
"""Renders a chat; passes every string of a user through the disguise."""


class Provenance:
    """Splits rendered prompts at the template's special tokens and the gateway's image tags.

    *words* are the words that the template looks for.
    """

    def __init__(
        self,
        special_tokens: Collection[str],
        image_tag: ImageTag | None = None,
        words: Collection[str] = frozenset(),
    ) -> None:
        tokens = sorted((token for token in special_tokens if token.strip()), key=len, reverse=True)
        patterns = [re.escape(token) for token in tokens]
        if image_tag is not None and image_tag.form and not any(token in image_tag.form for token in tokens):
            patterns.append(image_tag.pattern.pattern)
            tokens.append(image_tag.fixed)
        self._tokens = tokens
        self._special = re.compile("|".join(patterns) or "(?!)")
        self._words = words

    def split(self, render: Render) -> list[Segment]:
        """Return the prompt in segments. Raises InvalidValue if the template's text cannot be told from the users'."""
        plain = render(Disguise())
        tokens = self._tokens_in(plain) or self._tokens
        characters = _in_both_cases(tokens)
        parts = _Parts(tokens)
        is_harmless = cache(lambda word: word not in parts)
        spans = self._survivors(render, plain, characters, lambda text: text in self._words and is_harmless(text))
        if spans is None and (spans := self._survivors(render, plain, critical_characters(tokens))):
            parts = _Parts({plain[start:end] for start, end in spans})
            others = self._survivors(render, plain, characters, lambda text: text not in parts, leaves_searched=True)
            spans = None if others is None else spans & others
        if spans is None:
            raise InvalidValue(
                "The model's chat template interprets characters of its special tokens in the messages' text. Remove "
                "strings that look like special tokens from the messages.",
                "messages",
            )
        return _segments(plain, spans)

    def _tokens_in(self, text: str) -> set[str]:
        """Return the special tokens in *text*; they may overlap if a user's text begins one."""
        tokens: set[str] = set()
        position = 0
        while match := self._special.search(text, position):
            tokens.add(match[0])
            position = match.start() + 1
        return tokens

    def _survivors(
        self, render: Render, plain: str, characters: str, leaves: Leaves = _nothing, leaves_searched: bool = False
    ) -> Spans | None:
        """Return the places of special tokens that survive a disguise, or None if it does not render like *plain*."""
        disguise = Disguise(characters, leaves, leaves_searched, plain)
        try:
            disguised = render(disguise)
        except InvalidValue:
            return None
        if disguise.undo(disguised) != plain:
            return None
        return {match.span() for match in self._special.finditer(disguised)}


def _in_both_cases(tokens: Collection[str]) -> str:
    """Return the characters of *tokens* in both cases, and OTHER_CASES, without white space."""
    characters = {c for token in tokens for c in token + token.upper() + token.lower() if not c.isspace()}
    return "".join(sorted({*characters, *OTHER_CASES}))


class _Parts:
    """The texts from which a template could build one of *tokens* by adding text before or after them.

    A template may change their case, and replace or leave out what is neither letter nor digit.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = [token.casefold() for token in tokens]

    def __contains__(self, text: object) -> bool:
        if not isinstance(text, str) or not (text := text.strip()):
            return False
        head, tail = _normal(text[: self._longest]), _normal(text[-self._longest :])
        if len(text) <= self._longest and ((_letters(head) or text) in self._letters):
            return True
        lengths = range(1, len(head) + 1)
        return any(tail[-n:] in self._starts or head[:n] in self._ends for n in lengths)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._tokens), default=1)

    @cached_property
    def _letters(self) -> str:
        return "\n".join([*map(_letters, self._tokens), *self._tokens])

    @cached_property
    def _starts(self) -> set[str]:
        starts = {_normal(token[:n]) for token in self._tokens for n in range(1, len(token))}
        return {start for start in starts if _letters(start)}

    @cached_property
    def _ends(self) -> set[str]:
        ends = {_normal(token[n:]) for token in self._tokens for n in range(1, len(token))}
        return {end for end in ends if _letters(end)}


def _normal(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text.casefold())


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


def _segments(prompt: str, spans: Spans) -> list[Segment]:
    segments = []
    end = 0
    for start, stop in sorted(spans):
        segments += [Segment(prompt[end:start], is_special=False), Segment(prompt[start:stop], is_special=True)]
        end = stop
    return [segment for segment in (*segments, Segment(prompt[end:], is_special=False)) if segment.text]


def critical_characters(tokens: Collection[str]) -> str:
    """Return a small set of characters such that every one of *tokens* contains at least one of them.

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
    if not exchanges:
        return text
    if len(text) < len(exchanges):
        return "".join(map(exchanges.get, text, text))
    return "".join(_exchange_piece(text[start : start + PIECE], exchanges) for start in range(0, len(text), PIECE))


def _exchange_piece(piece: str, exchanges: Exchanges) -> str:
    # Five times as fast as str.translate().
    for old, new in exchanges.items():
        piece = piece.replace(old, new)
    return piece
