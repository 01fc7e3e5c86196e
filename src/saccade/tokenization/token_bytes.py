"""Converts tokens to the bytes that they represent, and decodes sequences of tokens to text.

A tokenizer.json declares how its tokens represent bytes. Text is held back while its last character is incomplete.
"""

import codecs
import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from saccade.errors import StartupError
from saccade.tokenization.tokenizer import TextStream

REPLACEMENT = "\ufffd"


SPACE = "\u2581"
"""SentencePiece's character for a space."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class ByteStream:
    """Decodes byte-level vocabularies: the text is all tokens' bytes joined. Incomplete characters are held back."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push_token(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes_of[token_id])

    def finish_text(self) -> str:
        """Return the replacement for a character that stayed incomplete."""
        return self._decoder.decode(b"", final=True)


class ByteFallbackStream:
    """Decodes vocabularies whose tokens are text, or single bytes for other characters (SentencePiece).

    Consecutive byte tokens are decoded together if they are valid UTF-8; otherwise each becomes U+FFFD. So they are
    held back until another token follows. The first *num_stripped* spaces of the text are omitted, because the
    tokenizer added them. The rules are those of the `tokenizers` library (decoders/byte_fallback.rs,
    decoders/strip.rs).
    """

    def __init__(self, bytes_of: Mapping[int, bytes], byte_token_ids: Collection[int], num_stripped: int = 0) -> None:
        self._bytes_of = bytes_of
        self._byte_token_ids = byte_token_ids
        self._num_stripped = num_stripped
        self._row = bytearray()

    def push_token(self, token_id: int) -> str:
        if token_id in self._byte_token_ids:
            self._row += self._bytes_of[token_id]
            return ""
        return self._strip(self._end_row() + self._bytes_of[token_id].decode())

    def finish_text(self) -> str:
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


class TokenBytes(Protocol):
    """Converts a vocabulary's tokens to the bytes that they represent."""

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that *token* adds to a text."""

    def stream(self, bytes_of: Mapping[int, bytes], continues: bool) -> TextStream:
        """Return a decoder of ids, from the bytes of each id; the ids may *continue* a text."""

    def longest(self, vocab: Collection[str], byte_fallback: bool) -> int:
        """Return the most bytes that a token of *vocab* represents, or 0 if *vocab* cannot represent all text."""


class ByteLevel:
    """Converts tokens in which each character represents a byte (GPT-2's encoder.py)."""

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes of *token*; its UTF-8 if it is not in the byte alphabet, as added tokens may be."""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            return token.encode()

    def stream(self, bytes_of: Mapping[int, bytes], continues: bool) -> TextStream:
        return ByteStream(bytes_of)

    def longest(self, vocab: Collection[str], byte_fallback: bool) -> int:
        """Return the most bytes that a token of *vocab* represents, or 0 if a byte has no token."""
        return max(map(len, vocab)) if all(character in vocab for character in _BYTE_OF) else 0


class ByteFallback:
    """Converts tokens that are text with a special character for spaces; <0xNN> is the byte NN (SentencePiece)."""

    def __init__(self, vocab: Mapping[str, int], num_stripped: int) -> None:
        self._byte_token_ids = frozenset(vocab[token] for token in vocab if _BYTE_TOKEN.fullmatch(token))
        self._num_stripped = num_stripped

    def to_bytes(self, token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()

    def stream(self, bytes_of: Mapping[int, bytes], continues: bool) -> TextStream:
        return ByteFallbackStream(bytes_of, self._byte_token_ids, 0 if continues else self._num_stripped)

    def longest(self, vocab: Collection[str], byte_fallback: bool) -> int:
        """Return the most bytes that a token of *vocab* represents, or 0 if a byte has no token.

        The character that stands for spaces counts with its own bytes, since users may also type it.
        """
        if not byte_fallback or not all(f"<0x{byte:02X}>" in vocab for byte in range(0x100)):
            return 0
        return max(len(token.encode()) for token in vocab)


def read_token_bytes(decoder: Mapping[str, Any] | None, vocab: Mapping[str, int]) -> TokenBytes:
    """Return the conversion for tokenizer.json's *decoder*. Raises StartupError for an unsupported decoder."""
    declared = decoder or {}
    parts = declared.get("decoders", [declared])
    match parts:
        case [{"type": "ByteLevel"}]:
            return ByteLevel()
        case [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ]:
            match rest:
                case []:
                    return ByteFallback(vocab, 0)
                case [{"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
                    return ByteFallback(vocab, start)
    kinds = [part.get("type") for part in parts]
    raise StartupError(
        f"tokenizer.json: the decoder {kinds} is not supported; ByteLevel and SentencePiece's ByteFallback are."
    )


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
