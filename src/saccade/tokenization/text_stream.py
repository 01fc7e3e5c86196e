"""Token ids to text as they come, equal to what the whole sequence decodes to."""

import codecs
from collections.abc import Callable, Collection
from typing import Protocol

REPLACEMENT = "\ufffd"


class TextStream(Protocol):
    """One answer's text as its ids come."""

    def push(self, token_id: int) -> str:
        """Return the text that *token_id* makes certain."""

    def finish(self) -> str:
        """Return the text that was held back; no more ids come."""


class ByteStream:
    """For vocabularies of bytes: a text is all tokens' bytes in a row; a character is shown once it is whole."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that *token_id* makes certain."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Return what stands for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class ByteFallbackStream:
    """For vocabularies of text, with a token per byte for what they lack (SentencePiece).

    Byte tokens in a row are one text if they are UTF-8 as a whole, else each of them is unreadable; so the row is held
    until another token ends it. The first *num_stripped* spaces of the text are left out: the tokenizer put them there.
    The rules are those of the `tokenizers` library (decoders/byte_fallback.rs, decoders/strip.rs).
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], byte_token_ids: Collection[int], num_stripped: int = 0
    ) -> None:
        self._token_bytes = token_bytes
        self._byte_token_ids = byte_token_ids
        self._num_stripped = num_stripped
        self._row = bytearray()

    def push(self, token_id: int) -> str:
        """Return the text that *token_id* makes certain."""
        if token_id in self._byte_token_ids:
            self._row += self._token_bytes(token_id)
            return ""
        return self._strip(self._end_row() + self._token_bytes(token_id).decode())

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
