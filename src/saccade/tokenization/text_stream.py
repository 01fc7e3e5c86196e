"""Decode token ids to text one by one, with the same result as decoding the whole sequence."""

import codecs
from collections.abc import Collection, Mapping
from typing import Protocol

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """The text of one answer, decoded one id at a time."""

    def push(self, token_id: int) -> str:
        """Return the text that is final after *token_id*."""

    def finish(self) -> str:
        """Return the text that was held back; no more ids follow."""


class ByteStream:
    """For byte-level vocabularies: the text is the concatenation of all tokens' bytes; incomplete characters wait."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of[token_id])

    def finish(self) -> str:
        """Return the replacement of a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class ByteFallbackStream:
    """For vocabularies of text that encode other characters as one token per byte (SentencePiece).

    Consecutive byte tokens are decoded together if they are valid UTF-8, else each becomes U+FFFD; so they are held
    back until another token follows. The first *num_stripped* spaces of the text are omitted, because the tokenizer
    added them. The rules are those of the `tokenizers` library (decoders/byte_fallback.rs, decoders/strip.rs).
    """

    def __init__(self, bytes_of: Mapping[int, bytes], byte_token_ids: Collection[int], num_stripped: int = 0) -> None:
        self._bytes_of = bytes_of
        self._byte_token_ids = byte_token_ids
        self._num_stripped = num_stripped
        self._row = bytearray()

    def push(self, token_id: int) -> str:
        if token_id in self._byte_token_ids:
            self._row += self._bytes_of[token_id]
            return ""
        return self._strip(self._end_row() + self._bytes_of[token_id].decode())

    def finish(self) -> str:
        """Return the text of the byte tokens that were held back."""
        return self._strip(self._end_row())

    def _end_row(self) -> str:
        if not self._row:
            return ""
        row, self._row = bytes(self._row), bytearray()
        try:
            return row.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(row)

    def _strip(self, text: str) -> str:
        while self._num_stripped and text.startswith(" "):
            text = text[1:]
            self._num_stripped -= 1
        if text:
            self._num_stripped = 0
        return text
