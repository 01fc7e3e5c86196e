"""What every tokenizer offers, whatever file it comes from.

Special tokens become ids only where the chat template wrote them. The same strings typed by a user stay text, and
text without them gets exactly the ids of the reference.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saccade.errors import InvalidValue
from saccade.tokenization.text_bound import TextBound
from saccade.tokenization.text_stream import TextStream

MAX_TEXT_BYTES = 4 * 2**20
"""What is tokenised at a time: each byte may become a token, and tokens take far more memory than text."""


class Segment(NamedTuple):
    """A piece of a rendered prompt: a special token that the template wrote, or text."""

    text: str
    is_special: bool


class Tokenizer(ABC):
    """Text to token ids and back, for one checkpoint.

    *special_tokens* are the strings that become single ids where a template writes them, and nowhere else;
    *num_tokens* is one more than the highest id; *text_bound* tells how few tokens a text can have.
    """

    special_tokens: Mapping[str, int]
    num_tokens: int
    text_bound: TextBound

    @abstractmethod
    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids of a rendered prompt, with the BOS that the checkpoint puts before a text.

        Raises InvalidValue for more than MAX_TEXT_BYTES, and where text alone would become a special token.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that *token_id* adds to a text; a character may spread over several tokens."""

    @abstractmethod
    def token_id(self, content: str) -> int | None:
        """Return the id of the token that is written *content*, None where there is none."""

    @abstractmethod
    def is_special(self, token_id: int) -> bool:
        """Tell whether *token_id* is left out of answers, or no token of this model at all."""

    @abstractmethod
    def stream(self) -> TextStream:
        """Return what turns one answer's ids into text."""

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of *text*; no part of it is taken for a special token."""
        return self.encode([Segment(text, is_special=False)])

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of *token_ids*, special tokens shown as they are written."""
        stream = self.stream()
        return "".join(stream.push(token_id) for token_id in token_ids) + stream.finish()


def check_length(text: str) -> None:
    """Raise InvalidValue where *text* is too long to be tokenised."""
    if len(text) * 4 > MAX_TEXT_BYTES and len(text.encode()) > MAX_TEXT_BYTES:
        raise InvalidValue(f"The text has more than {MAX_TEXT_BYTES} bytes.")


def special_variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like as a chat template may use them, from tokenizer_config.json."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        match tokenizer_config.get(name):
            case str(content) | {"content": str(content)}:
                found[name] = content
    return found
