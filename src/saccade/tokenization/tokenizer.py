"""The interface of all tokenizers.

Special tokens become ids only if the chat template wrote them. The same strings from a user stay text, and text without
them gets exactly the reference's ids.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from saccade.errors import InvalidValue

WHITE_SPACE: Final = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())
PIECE_CHARACTERS = 4096
"""A part of a prompt that may be known from before is at least so long."""

MAX_TEXT_BYTES = 4 * 2**20
"""The most text in one call: each byte may become a token, and tokens take far more memory than text."""

Pieces = Callable[[Sequence[str], Callable[[str], list[int]]], list[int]]
"""Returns the ids of texts together. It may know some from before, and calls the function for the others."""


class TextStream(Protocol):
    """The text of one answer, decoded one id at a time."""

    def push_token(self, token_id: int) -> str:
        """Return the text that is final after *token_id*."""

    def finish_text(self) -> str:
        """Return the text that was held back; no more ids follow."""


@dataclass(frozen=True)
class TextBound:
    """A token covers at most *bytes_per_token* bytes of the normalised text; 0 means no bound.

    Normalisation shortens a text that is not ASCII at most by the factor *shrinks*. With *swallows_space*, white space
    does not count.
    """

    bytes_per_token: int
    shrinks: int = 1
    swallows_space: bool = False

    def least_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens in *text*."""
        if not self.bytes_per_token:
            return 0
        num_bytes = len(text.encode())
        if self.swallows_space:
            num_bytes -= sum(text.count(space) * len(space.encode()) for space in WHITE_SPACE)
        return -(-num_bytes // (self.bytes_per_token * (1 if text.isascii() else self.shrinks)))


class Segment(NamedTuple):
    """A piece of a rendered prompt: a special token that the template wrote, or text."""

    text: str
    is_special: bool


class TokenTable(dict[int, bytes]):
    """The bytes that each id adds to a text, read on first use. An id that is not a token adds none."""

    def __init__(self, read: Callable[[int], bytes], num_tokens: int) -> None:
        self._read = read
        self._num_tokens = num_tokens

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._num_tokens:
            return b""
        known = self[token_id] = self._read(token_id)
        return known


class Tokenizer(ABC):
    """Turns text into token ids and back, for one checkpoint.

    *special_tokens* are the strings that become single ids if a template writes them, and only then; answers omit the
    *hidden_ids*. *num_tokens* is one more than the highest id; *text_bound* is a lower bound on a text's tokens.
    *bytes_of* has the bytes of each token; a character may need several tokens.
    """

    special_tokens: Mapping[str, int]
    hidden_ids: frozenset[int]
    bytes_of: TokenTable
    num_tokens: int
    text_bound: TextBound

    @abstractmethod
    def encode(self, segments: Iterable[Segment], pieces: Pieces | None = None) -> list[int]:
        """Return the ids of a rendered prompt, with the checkpoint's BOS before the text.

        The parts of a long prompt go through *pieces* if set. Raises InvalidValue for more than MAX_TEXT_BYTES, and if
        users' text would become a special token.
        """

    def encode_as_vllm_chat(self, segments: Iterable[Segment], pieces: Pieces | None = None) -> list[int]:
        """Return vLLM's ids for the same prompt as a chat; by default the ids from encode()."""
        return self.encode(segments, pieces)

    @abstractmethod
    def token_id(self, content: str) -> int | None:
        """Return the id of the token *content*, or None if there is none."""

    def is_special(self, token_id: int) -> bool:
        """Return whether *token_id* is omitted from answers or is not a token of this model."""
        return token_id in self.hidden_ids or not 0 <= token_id < self.num_tokens

    @abstractmethod
    def stream(self, *, continues: bool = False) -> TextStream:
        """Return a decoder for one answer's ids. If the answer *continues* a text, its first space is kept."""

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of *text*; no part of it becomes a special token."""
        return self.encode([Segment(text, is_special=False)])

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of *token_ids*, special tokens included."""
        stream = self.stream()
        return "".join(stream.push_token(token_id) for token_id in token_ids) + stream.finish_text()


def check_length(text: str) -> None:
    """Raise InvalidValue if *text* is too long to be tokenised."""
    if len(text) * 4 > MAX_TEXT_BYTES and len(text.encode()) > MAX_TEXT_BYTES:
        raise InvalidValue(f"The text has more than {MAX_TEXT_BYTES} bytes.")


def special_variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like from tokenizer_config.json, as variables of a chat template."""
    variables: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        match tokenizer_config.get(name):
            case str(content) | {"content": str(content)}:
                variables[name] = content
    return variables
