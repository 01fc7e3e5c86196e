"""The tokenizer of a tiktoken.model: byte pairs by rank, then 256 reserved ids (Kimi's releases).

Source of the rules: the releases' tokenization_kimi.py. The tokenizer.json of some checkpoints is a conversion; the
model was not trained with it.
"""

import binascii
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import pybase64
import tiktoken

from saccade.errors import StartupError
from saccade.tokenization.added_tokens import declared_tokens
from saccade.tokenization.token_bytes import ByteStream
from saccade.tokenization.tokenizer import (
    PIECE_CHARACTERS,
    Pieces,
    Segment,
    TextBound,
    TextStream,
    Tokenizer,
    TokenTable,
    check_length,
)

NUM_RESERVED = 256
CHUNK_CHARACTERS = 400_000
"""The release encodes at most this many characters at a time..."""

RUN_CHARACTERS = 25_000
"""...and at most this many consecutive ones that are all spaces or all others. Every cut is a border between tokens."""

_SHORT = rf"(?:\s{{1,{RUN_CHARACTERS}}}+(?!\s)|\S{{1,{RUN_CHARACTERS}}}+(?!\S))*+"
_NEXT_LONG_RUN = re.compile(rf"{_SHORT}(\s+|\S+)?")
"""Skips runs that are short enough, without backtracking, so that the time is in proportion to the text."""


class TiktokenTokenizer(Tokenizer):
    """Turns text into token ids and back, for one tiktoken.model.

    *model* is the file's content, one line per token with its base64 and its rank; *pattern* splits text before it is
    encoded; *tokenizer_config* names the reserved ids. All reserved ids are special tokens for templates and users.
    Answers omit them, except those with `special: false` in tokenizer_config.json. *protected* lists tokens that
    represent images, by id or content; answers always omit these. Raises StartupError if a file is wrong.
    """

    def __init__(
        self, model: bytes, tokenizer_config: Mapping[str, Any], pattern: str, protected: Collection[int | str] = ()
    ) -> None:
        ranks = _read_ranks(model)
        self.num_tokens = len(ranks) + NUM_RESERVED
        self.text_bound = TextBound(max(map(len, ranks)))
        declared = declared_tokens(tokenizer_config)
        reserved = range(len(ranks), self.num_tokens)
        names = {
            token_id: declared[token_id]["content"] if token_id in declared else f"<|reserved_token_{token_id}|>"
            for token_id in reserved
        }
        self.special_tokens = {content: token_id for token_id, content in names.items()}
        if len(self.special_tokens) != NUM_RESERVED:
            raise StartupError("tokenizer_config.json: `added_tokens_decoder` gives two reserved ids the same content.")
        visible = {token_id for token_id in reserved if declared.get(token_id, {}).get("special") is False}
        visible -= {self.special_tokens.get(token, token) if isinstance(token, str) else token for token in protected}
        self.hidden_ids = frozenset(reserved) - visible
        self._encoding = tiktoken.Encoding(
            "tiktoken.model", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        self.bytes_of = TokenTable(self._encoding.decode_single_token_bytes, self.num_tokens)

    def encode(self, segments: Iterable[Segment], pieces: Pieces | None = None) -> list[int]:
        """Return the ids of a rendered prompt. Raises InvalidValue for more than MAX_TEXT_BYTES."""
        prompt = list(segments)
        text = "".join(segment.text for segment in prompt)
        check_length(text)
        token_ids: list[int] = []
        for piece in _cut(_join_texts(prompt), list(_cuts(text))):
            if piece.is_special:
                token_ids.append(self.special_tokens[piece.text])
            elif pieces is not None and len(piece.text) >= PIECE_CHARACTERS:
                token_ids += pieces([piece.text], self._encoding.encode_ordinary)
            else:
                token_ids += self._encoding.encode_ordinary(piece.text)
        return token_ids

    def token_id(self, content: str) -> int | None:
        try:
            return self._encoding.encode_single_token(content)
        except KeyError:
            return None

    def stream(self, *, continues: bool = False) -> TextStream:
        return ByteStream(self.bytes_of)


def _read_ranks(model: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(model.splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[pybase64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise StartupError(f"tiktoken.model, line {number} must be a token in base64 and its rank.") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise StartupError("tiktoken.model: the ranks must be all the numbers from 0 on, each once.")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise StartupError("tiktoken.model: every byte must be a token.")
    return ranks


def _join_texts(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Join consecutive texts, so that they are split and encoded as one."""
    for is_special, group in groupby(segments, key=lambda segment: segment.is_special):
        if is_special:
            yield from group
        else:
            yield Segment("".join(segment.text for segment in group), is_special=False)


def _cuts(text: str) -> Iterator[int]:
    """Yield the positions at which the release cuts *text*, special tokens included, before it encodes the pieces."""
    if len(text) <= RUN_CHARACTERS:
        return
    for start in range(0, len(text), CHUNK_CHARACTERS):
        end = min(start + CHUNK_CHARACTERS, len(text))
        if start:
            yield start
        for match in _NEXT_LONG_RUN.finditer(text, start, end):
            if match[1]:
                yield from range(match.start(1) + RUN_CHARACTERS, match.end(1), RUN_CHARACTERS)


def _cut(segments: Iterable[Segment], cuts: Sequence[int]) -> Iterator[Segment]:
    """Cut the texts of *segments* at *cuts*, positions in the whole; special tokens stay whole."""
    start = 0
    for segment in segments:
        end = start + len(segment.text)
        within = [cut - start for cut in cuts[bisect_right(cuts, start) : bisect_left(cuts, end)]]
        if within and not segment.is_special:
            for first, last in pairwise([0, *within, len(segment.text)]):
                yield Segment(segment.text[first:last], is_special=False)
        else:
            yield segment
        start = end
