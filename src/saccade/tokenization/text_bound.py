"""Computes a lower bound on a text's number of tokens from its bytes, so that texts that cannot fit are not tokenised.

If every byte of a text belongs to some token, the number of tokens is at least the text's length divided by the longest
token's, in bytes. A tokenizer.json can violate this in three ways. Its normalizer can shorten the text: the bound
accounts for NFC, and files with a normalizer that may shorten it otherwise have no bound. Added tokens can strip the
white space next to them; white space then does not count. Unknown text can be dropped or become a single token; such
files have no bound.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import tokenizers

from saccade.tokenization.token_bytes import TokenBytes
from saccade.tokenization.tokenizer import TextBound

NFC_SHRINKS: Final = 4
"""Above the largest ratio of a text's bytes to those of its NFC, which is 3.5, for the decomposed U+0390."""

UNKNOWN: Final = TextBound(0)


def read_bound(
    parsed: Mapping[str, Any], token_bytes: TokenBytes, vocab: Collection[str], added: Iterable[tokenizers.AddedToken]
) -> TextBound:
    """Return the bound for a *parsed* tokenizer.json, with its model's *vocab* and its *added* tokens."""
    model, tokens = parsed["model"], list(added)
    shrinks = _shrinks(parsed.get("normalizer"))
    altered = any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    if model.get("type") != "BPE" or altered or parsed.get("truncation") or not shrinks:
        return UNKNOWN
    longest = token_bytes.longest(vocab, bool(model.get("byte_fallback")))
    if not longest or not _keeps_text(parsed.get("pre_tokenizer")):
        return UNKNOWN
    longest = max(longest, *(len(token.content.encode()) for token in tokens), 1)
    return TextBound(longest, shrinks, any(token.lstrip or token.rstrip for token in tokens))


def _shrinks(normalizer: Mapping[str, Any] | None) -> int:
    """Return the largest factor by which *normalizer* shortens a text's bytes, or 0 if it is unknown."""
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
