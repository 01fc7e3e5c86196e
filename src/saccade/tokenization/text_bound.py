"""How few tokens a text can have: a bound from its bytes, so that a text that cannot fit is not tokenised.

A text has at least as many tokens as its bytes divided by the bytes of the longest token, if every byte of the text
ends up in some token. A tokenizer.json can break that in three ways. Its normalizer can make the text shorter: NFC is
allowed for, others have no bound. Added tokens can swallow the white space beside them: white space then does not
count. Text can vanish, or become one token for what is unknown: such files have no bound.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import tokenizers

from saccade.tokenization.spelling import Spelling

NFC_SHRINKS: Final = 4
"""No text has so many times the bytes of its NFC; the most is 3.5, of the parts of U+0390."""

WHITE_SPACE: Final = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())


@dataclass(frozen=True)
class TextBound:
    """*bytes_per_token* of a normalised text are the most that a token stands for; 0 means that nothing is known.

    Normalisation divides the bytes of a text beyond ASCII by *shrinks* at most.
    """

    bytes_per_token: int
    shrinks: int = 1
    swallows_space: bool = False

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that *text* has at least."""
        if not self.bytes_per_token:
            return 0
        num_bytes = len(text.encode())
        if self.swallows_space:
            num_bytes -= sum(text.count(space) * len(space.encode()) for space in WHITE_SPACE)
        return -(-num_bytes // (self.bytes_per_token * (1 if text.isascii() else self.shrinks)))


UNKNOWN: Final = TextBound(0)


def read_bound(
    parsed: Mapping[str, Any], spelling: Spelling, vocab: Collection[str], added: Iterable[tokenizers.AddedToken]
) -> TextBound:
    """Return the bound of a tokenizer.json that is *parsed*, with the *vocab* of its model and its *added* tokens."""
    model, tokens = parsed["model"], list(added)
    shrinks = _shrinks(parsed.get("normalizer"))
    altered = any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    if model.get("type") != "BPE" or altered or parsed.get("truncation") or not shrinks:
        return UNKNOWN
    longest = spelling.longest(vocab, bool(model.get("byte_fallback")))
    if not longest or not _keeps_text(parsed.get("pre_tokenizer")):
        return UNKNOWN
    longest = max(longest, *(len(token.content.encode()) for token in tokens), 1)
    return TextBound(longest, shrinks, any(token.lstrip or token.rstrip for token in tokens))


def _shrinks(normalizer: Mapping[str, Any] | None) -> int:
    """Return by how much *normalizer* divides the bytes of a text at most, 0 where that is not known."""
    match normalizer:
        case None | {"type": "Prepend"}:
            return 1
        case {"type": "NFC"}:
            return NFC_SHRINKS
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return int(len(content.encode()) >= len(pattern.encode()))
        case {"type": "Sequence", "normalizers": list(parts)}:
            factor = 1
            for part in parts:
                factor *= _shrinks(part)
            return factor
        case _:
            return 0


def _keeps_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case None | {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Sequence", "pretokenizers": list(parts)}:
            return all(map(_keeps_text, parts))
        case _:
            return False
