"""Tokenizers of releases, by the vocabularies of tiny checkpoints that have the releases' tags."""

from functools import cache
from typing import Any

from judges.reading import TAGS, served, tokens

CHECKPOINTS = (
    ("kimi-k3", "kimi_k3"), ("kimi", "kimi_k25"), ("gemma", "gemma4"), ("glm", "glm4v"), ("qwen3.5", "qwen3_5"),
    ("", "qwen3_vl"),
)  # fmt: skip


class StandInTokenizer:
    """What tests use of a tokenizer of transformers."""

    def __init__(self, checkpoint: str) -> None:
        self._model = served(checkpoint)
        self._ids = {tag: self._model.tokenizer.token_id(tag) for tag in TAGS} | dict(
            self._model.tokenizer.special_tokens
        )
        self._names = {number: tag for tag, number in self._ids.items() if number is not None}
        self.all_special_tokens = list(self._names.values())
        self.all_special_ids = list(self._names)

    def encode(self, text: str, add_special_tokens: bool = True, **named: Any) -> list[int]:
        """Return token ids."""
        return tokens(self._model, text)

    def decode(self, ids: Any, skip_special_tokens: bool = False, **named: Any) -> str:
        """Return the text of token ids."""
        ids = [ids] if isinstance(ids, int) else ids
        spelled = (self._spelled(one) for one in ids if not (skip_special_tokens and one in self._names))
        return b"".join(spelled).decode(errors="replace")

    def _spelled(self, number: int) -> bytes:
        return self._names[number].encode() if number in self._names else self._model.tokenizer.bytes_of[number]

    def tokenize(self, text: str, **named: Any) -> list[str]:
        """Return tokens."""
        return [self._token(one) for one in self.encode(text)]

    def _token(self, number: int) -> str:
        return self._spelled(number).decode("latin-1")

    def get_vocab(self) -> dict[str, int]:
        """Return ids by token."""
        found = {spelled.decode("latin-1"): number for number, spelled in self._model.tokenizer.bytes_of.items()}
        return found | {name: number for number, name in self._names.items()}

    def convert_ids_to_tokens(self, ids: list[int], **named: Any) -> list[str]:
        """Return tokens."""
        return [self._token(one) for one in ids]

    def convert_tokens_to_string(self, found: list[str]) -> str:
        """Return the text of tokens."""
        return "".join(found).encode("latin-1", errors="replace").decode(errors="replace")

    def convert_tokens_to_ids(self, token: Any) -> Any:
        """Return the id of a token."""
        vocab = self.get_vocab()
        return vocab.get(token) if isinstance(token, str) else [vocab.get(one) for one in token]


@cache
def _tokenizer(checkpoint: str) -> StandInTokenizer:
    return StandInTokenizer(checkpoint)


def tokenizer_of(tokenizer_name: str, *given: Any, **named: Any) -> StandInTokenizer:
    """Return the stand-in of a release's tokenizer."""
    return _tokenizer(next(checkpoint for part, checkpoint in CHECKPOINTS if part in str(tokenizer_name).lower()))


def detokenized(
    tokenizer: StandInTokenizer, all_input_ids: list[int], *given: Any, **named: Any
) -> tuple[list[str], str, int, int]:
    """Return the last token, the text that it adds, and two places that the next call does not need."""
    before, after = tokenizer.decode(all_input_ids[:-1]), tokenizer.decode(all_input_ids)
    return tokenizer.convert_ids_to_tokens(all_input_ids[-1:]), after[len(before) :], 0, 0
