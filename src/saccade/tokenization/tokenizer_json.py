"""The tokenizer of a tokenizer.json, run by the `tokenizers` library.

Users cannot write special tokens: the library treats special tokens as text. Every special token gets a random alias,
an added token that users cannot guess. The template's special tokens are passed to the library as aliases; all other
text is passed unchanged. Tags (TAG) that are added tokens are treated likewise, but answers show them, as the reference
does. Each call encodes the whole prompt, or a piece that has the same ids apart as within the whole. So
pre-tokenisation is the same as in the reference (`transformers`, AutoTokenizer.apply_chat_template).
"""

import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from saccade.errors import InvalidValue, StartupError
from saccade.tokenization.added_tokens import merge_special_tokens
from saccade.tokenization.text_bound import read_bound
from saccade.tokenization.token_bytes import read_token_bytes
from saccade.tokenization.tokenizer import (
    PIECE_CHARACTERS,
    Pieces,
    Segment,
    TextStream,
    Tokenizer,
    TokenTable,
    check_length,
)

PLAIN_WORD = "a"

TAG = re.compile(r"</?[^\s<>/]+>")
"""Added tokens of this form, such as `<think>` and `</tool_call>`, have a meaning although they are not special."""


class JsonTokenizer(Tokenizer):
    """Turns text into token ids and back, for one tokenizer.json.

    *tokenizer_json* is the file's content, and *tokenizer_config* the parsed tokenizer_config.json, or {} if there is
    none. *protected* are tokens, by id or content, that represent images; if they exist, they are special even if the
    files do not say so. Raises StartupError if a file is wrong.
    """

    def __init__(
        self, tokenizer_json: bytes, tokenizer_config: Mapping[str, Any], protected: Collection[int | str] = ()
    ) -> None:
        parsed = _parse(tokenizer_json)
        model_vocab = _model_vocab(parsed["model"])
        self._token_bytes = read_token_bytes(parsed.get("decoder"), model_vocab)
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        merge_special_tokens(self._tokenizer, tokenizer_config)
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.num_tokens = max(vocab.values()) + 1
        hidden = self._find_special_tokens(protected)
        self.hidden_ids = frozenset(hidden.values())
        self.special_tokens = hidden | self._protect_tags()
        self._special_ids = frozenset(self.special_tokens.values())
        self._before = [] if tokenizer_config.get("add_bos_token") is False else self._find_ids_before_text()
        # Unknown text becomes this token, in the reference too; users can write it without harm.
        self._forbidden_ids = self._special_ids - {vocab.get(str(parsed["model"].get("unk_token")))}
        self._aliases = self._add_aliases()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.text_bound = read_bound(parsed, self._token_bytes, model_vocab, added)
        self._tokenizer.encode_special_tokens = True
        self.bytes_of = TokenTable(self._read_bytes, self.num_tokens)

    def encode(self, segments: Iterable[Segment], pieces: Pieces | None = None) -> list[int]:
        """Return the ids of a rendered prompt, with the BOS of the file's post-processor before the text.

        `add_bos_token: false` in tokenizer_config.json turns the BOS off; if the template writes one, none is added.
        Raises InvalidValue for more than MAX_TEXT_BYTES, and if users' text would become a special token.
        """
        prompt = list(segments)
        encoded = self._without_bos(prompt, pieces)
        return encoded if self._begins_with_bos(prompt) else self._before + encoded

    def encode_as_vllm_chat(self, segments: Iterable[Segment], pieces: Pieces | None = None) -> list[int]:
        """Like encode(), but without a BOS that the template did not write, since vLLM adds none to a chat.

        Raises InvalidValue as encode() does.
        """
        return self._without_bos(segments, pieces)

    def _without_bos(self, segments: Iterable[Segment], pieces: Pieces | None) -> list[int]:
        texts = self._cut(segments)
        text = "".join(texts)
        check_length(text)
        return self._encode(text) if pieces is None else pieces(texts, self._encode)

    def _cut(self, segments: Iterable[Segment]) -> list[str]:
        """Return the prompt in pieces of PIECE_CHARACTERS or more, which have the same ids apart as within the whole.

        The library splits a text at special tokens first, so each piece after the first begins with one. That token
        must not strip white space before it; other neighbours do not matter.
        """
        pieces: list[list[str]] = [[]]
        num_characters = 0
        for text, is_special in segments:
            if num_characters >= PIECE_CHARACTERS and is_special and text not in self._joined:
                pieces.append([])
                num_characters = 0
            pieces[-1].append(self._aliases[text] if is_special else text)
            num_characters += len(text)
        return ["".join(piece) for piece in pieces]

    def _encode(self, text: str) -> list[int]:
        # Only the library's batch calls release the interpreter's lock.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._forbidden_ids.isdisjoint(ids):
            raise InvalidValue(
                "The text contains a special token of this model, which cannot be encoded as text; remove it."
            )
        return [self._special_of.get(token_id, token_id) for token_id in ids]

    def token_id(self, content: str) -> int | None:
        """Return the id of the token *content* of tokenizer.json, or None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(content)
        return token_id

    def stream(self, *, continues: bool = False) -> TextStream:
        return self._token_bytes.stream(self.bytes_of, continues)

    def _read_bytes(self, token_id: int) -> bytes:
        return self._token_bytes.to_bytes(self._tokenizer.id_to_token(token_id) or "")

    def _begins_with_bos(self, segments: Sequence[Segment]) -> bool:
        if not self._before or not segments or not segments[0].is_special:
            return False
        return self.special_tokens[segments[0].text] == self._before[0]

    def _find_special_tokens(self, protected: Collection[int | str]) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        for id_or_content in protected:
            token_id = self._tokenizer.token_to_id(id_or_content) if isinstance(id_or_content, str) else id_or_content
            content = self._tokenizer.id_to_token(token_id) if token_id is not None else None
            if token_id is None or content is None:
                continue
            if content not in special:
                flags = _flags(added[token_id]) if token_id in added else {}
                self._tokenizer.add_special_tokens([tokenizers.AddedToken(content, special=True, **flags)])
            special[content] = token_id
        return special

    def _protect_tags(self) -> dict[str, int]:
        """Make the tags special tokens, so that the library finds no tags in users' text. Return their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        tags = {id_: token for id_, token in added.items() if not token.special and TAG.fullmatch(token.content)}
        self._tokenizer.add_special_tokens(
            [tokenizers.AddedToken(token.content, special=True, **_flags(token)) for token in tags.values()]
        )
        return {token.content: token_id for token_id, token in tags.items()}

    def _find_ids_before_text(self) -> list[int]:
        bare: list[int] = self._tokenizer.encode(PLAIN_WORD, add_special_tokens=False).ids
        dressed: list[int] = self._tokenizer.encode(PLAIN_WORD, add_special_tokens=True).ids
        if dressed[len(dressed) - len(bare) :] != bare:
            raise StartupError("tokenizer.json: a post-processor that adds tokens after a text is not supported.")
        return dressed[: len(dressed) - len(bare)]

    def _add_aliases(self) -> dict[str, str]:
        """For every special token, add a token with the same flags and a name that cannot be guessed."""
        added = self._tokenizer.get_added_tokens_decoder()
        aliases = {content: secrets.token_hex(16) for content in self.special_tokens}
        self._joined = {
            content
            for content, token_id in self.special_tokens.items()
            if added[token_id].lstrip or added[token_id].single_word
        }
        twins = []
        for content, token_id in self.special_tokens.items():
            # Matched before the text is normalised, so that a normaliser cannot hide it.
            flags = _flags(added[token_id]) | {"normalized": False}
            twins.append(tokenizers.AddedToken(aliases[content], special=False, **flags))
        self._tokenizer.add_tokens(twins)
        self._special_of = {
            self._tokenizer.token_to_id(alias): self.special_tokens[content] for content, alias in aliases.items()
        }
        return aliases


def _parse(tokenizer_json: bytes) -> Mapping[str, Any]:
    try:
        parsed = json.loads(tokenizer_json)
    except ValueError as error:
        raise StartupError("tokenizer.json is not valid JSON.") from error
    match parsed:
        case {"model": {"vocab": dict() | list()}}:
            return dict(parsed)
    raise StartupError("tokenizer.json has no `model` with a `vocab`.")


def _model_vocab(model: Mapping[str, Any]) -> dict[str, int]:
    vocab = model["vocab"]
    return vocab if isinstance(vocab, dict) else {entry[0]: token_id for token_id, entry in enumerate(vocab)}


def _flags(token: tokenizers.AddedToken) -> dict[str, bool]:
    return {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
