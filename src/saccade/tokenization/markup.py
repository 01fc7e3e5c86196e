"""Reads answer tags that span several tokens, `<|open|>NAME<|sep|>` and `<|close|>NAME<|sep|>`, each as one id.

Such an id is negative: it is not a token of any vocabulary, and has no text.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from saccade.tokenization.tokenizer import Tokenizer

MAX_TAG_TOKENS: Final = 256
"""A longer tag is text."""

THINK, END_THINK, TOOLS, END_TOOLS, CALL, END_CALL, BORDER, HIDDEN = range(-1, -9, -1)
"""The ids of tags. BORDER divides the parts of a call; HIDDEN stands for the borders of what is content anyway."""

OPENED: Final[Mapping[str, int]] = MappingProxyType(
    {"think": THINK, "tools": TOOLS, "response": HIDDEN, "message": HIDDEN}
)
CLOSED: Final[Mapping[str, int]] = MappingProxyType(
    {
        "think": END_THINK,
        "tools": END_TOOLS,
        "call": END_CALL,
        "argument": BORDER,
        "json": BORDER,
        "response": HIDDEN,
        "message": HIDDEN,
    }
)
WITH_ATTRIBUTES: Final[Mapping[str, int]] = MappingProxyType({"call": CALL, "argument": BORDER, "json": BORDER})
"""Opened tags whose text, names and attributes, follows the id up to a BORDER."""


class Markup(NamedTuple):
    """The ids of the tokens that begin and end tags."""

    open_id: int
    close_id: int
    sep_id: int

    @classmethod
    def of_tokenizer(cls, tokenizer: Tokenizer) -> "Markup | None":
        """Return the ids in a vocabulary, or None if it lacks one of them."""
        ids = [tokenizer.special_tokens.get(tag) for tag in ("<|open|>", "<|close|>", "<|sep|>")]
        return None if None in ids else cls(*ids)  # type: ignore[arg-type]


class MarkupReader:
    """Reads the tags of one answer.

    *num_tokens* is the number of tokens taken so far, minus the number of ids returned for them.
    """

    def __init__(self, markup: Markup, tokenizer: Tokenizer) -> None:
        self._markup = markup
        self._tokenizer = tokenizer
        self._pending: list[int] = []
        self._num_joined = 0

    @property
    def num_tokens(self) -> int:
        return self._num_joined + len(self._pending)

    def last_tag(self, prompt: Sequence[int]) -> list[int]:
        """Return the id of the tag at the end of *prompt*, before the answer; [] if there is none."""
        reader = MarkupReader(self._markup, self._tokenizer)
        return [token_id for token_id in reader.take_tokens(prompt[-MAX_TAG_TOKENS:])[-1:] if token_id < 0]

    def take_tokens(self, token_ids: Sequence[int], is_last: bool = False) -> list[int]:
        """Return *token_ids* with an id in place of each tag.

        The tokens of an incomplete tag wait for the next call. At the end of the answer they are dropped, but
        *num_tokens* counts them.
        """
        read: list[int] = []
        for token_id in token_ids:
            if token_id in (self._markup.open_id, self._markup.close_id):
                read += self._pending
                self._pending = [token_id]
            elif self._pending:
                self._pending.append(token_id)
                if token_id == self._markup.sep_id or len(self._pending) > MAX_TAG_TOKENS:
                    read += self._tag()
            else:
                read.append(token_id)
        if is_last:
            self._num_joined += len(self._pending)
            self._pending = []
        return read

    def _tag(self) -> list[int]:
        pending, self._pending = self._pending, []
        if pending[-1] != self._markup.sep_id:
            return pending
        inside = pending[1:-1]
        name = self._tokenizer.decode(inside).split(" ", 1)[0]
        is_opened = pending[0] == self._markup.open_id
        if is_opened and name in WITH_ATTRIBUTES:
            return [WITH_ATTRIBUTES[name], *inside, BORDER]
        tag = (OPENED if is_opened else CLOSED).get(name)
        if tag is None:
            return pending
        self._num_joined += len(pending) - 1
        return [tag]
