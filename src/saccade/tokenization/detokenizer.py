"""Token ids to text, one delta at a time, with the same result as decoding the whole sequence.

A tokenizer.json declares how its tokens represent bytes. Text is held back while its last character is incomplete, and
while its last characters may still become a stop string. Both checks take constant time per byte, however the text is
split into tokens.
"""

import codecs
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from saccade.errors import StartupError
from saccade.tokenization.tokenizer import TextStream, Tokenizer

REPLACEMENT = "\ufffd"


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


SPACE = "\u2581"
"""SentencePiece's character for a space."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Protocol):
    """Conversion of a vocabulary's tokens to the bytes that they represent."""

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that *token* adds to a text."""

    def stream(self, bytes_of: Mapping[int, bytes], continues: bool) -> TextStream:
        """Return a decoder of ids, given the bytes of each id; the ids may *continue* a text."""

    def longest(self, vocab: Collection[str], byte_fallback: bool) -> int:
        """Return the most bytes of text that a token of *vocab* represents, 0 if *vocab* cannot represent all text."""


class ByteLevel:
    """Each character of a token represents a byte (GPT-2's encoder.py)."""

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes of *token*; its UTF-8 if it is not in the byte alphabet, as added tokens may be."""
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            return token.encode()

    def stream(self, bytes_of: Mapping[int, bytes], continues: bool) -> TextStream:
        return ByteStream(bytes_of)

    def longest(self, vocab: Collection[str], byte_fallback: bool) -> int:
        """Return the most bytes that a token of *vocab* represents, 0 if a byte has no token."""
        return max(map(len, vocab)) if all(character in vocab for character in _BYTE_OF) else 0


class ByteFallback:
    """Tokens are text with a special character for spaces; <0xNN> is the byte NN (SentencePiece)."""

    def __init__(self, vocab: Mapping[str, int], num_stripped: int) -> None:
        self._byte_token_ids = frozenset(vocab[token] for token in vocab if _BYTE_TOKEN.fullmatch(token))
        self._num_stripped = num_stripped

    def to_bytes(self, token: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()

    def stream(self, bytes_of: Mapping[int, bytes], continues: bool) -> TextStream:
        return ByteFallbackStream(bytes_of, self._byte_token_ids, 0 if continues else self._num_stripped)

    def longest(self, vocab: Collection[str], byte_fallback: bool) -> int:
        """Return the most bytes that a token of *vocab* represents; users may type the character for spaces, too."""
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


class StopString:
    """The text of a stop string, and its prefix function as far as any answer of the request has needed it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_prepared = 0
        """Characters whose prefixes are known: no more than the longest match so far."""

        self._lengths: list[int] = []

    def fallback(self, num_matched: int) -> int:
        """Return the length of the longest proper prefix of the first *num_matched* characters that also ends there."""
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
        """Take the next character; return whether it completes the stop string. Then the search starts again."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._stop.fallback(self.num_matched)
        self.num_matched += self.text[self.num_matched] == character
        is_complete = self.num_matched == len(self.text)
        if is_complete:
            self.num_matched = self._stop.fallback(self.num_matched)
        return is_complete


@dataclass(frozen=True)
class TextRules:
    """Which part of an answer is shown. *stop* strings end it, once it has more than *min_tokens* tokens.

    The stop string itself is shown only with *shows_stop*, and special tokens only with *shows_special*.
    """

    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    shows_stop: bool = False
    shows_special: bool = False

    @cached_property
    def stop_strings(self) -> tuple[StopString, ...]:
        """Those of *stop*, which all answers with these rules share: each grows as answers match it."""
        return tuple(map(StopString, self.stop))


PLAIN = TextRules()


class Detokenizer:
    """The growing text of one answer. It ends at the stop string that is complete first; the longer one in a tie.

    *num_tokens* counts the tokens of this text, *num_others* tokens of the answer that do not belong to it. The text
    may *continue* that of the prompt.
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

    def push(self, token_ids: Iterable[int]) -> str:
        """Take more tokens and return the text that is now final. After a stop string, tokens are ignored."""
        text = ""
        for token_id in token_ids:
            if self.stop is not None:
                break
            self.num_tokens += 1
            is_known = 0 <= token_id < self._num_known
            if self.rules.shows_special or (is_known and token_id not in self._hidden_ids):
                text += self._release(self._stream.push(token_id))
        return text

    def push_text(self, text: str) -> str:
        """As push(), for text of a part of a token, which does not count."""
        return "" if self.stop is not None else self._release(self._stream.finish() + text)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        if self.stop is not None:
            return ""
        text = self._release(self._stream.finish()) + self._pending
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
