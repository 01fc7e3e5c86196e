"""Load tokenizer files; encode.

Special tokens become ids only where the chat template wrote them. The same strings typed by a user stay text, and
text without them gets exactly the ids of the reference (`transformers`, AutoTokenizer.apply_chat_template).

How: the tokenizer is told to treat special tokens as text, and every special token gets a random alias, an added token
that nobody can type. A special token that the template wrote is handed over as its alias; the rest goes in as it is.
One call encodes the whole prompt, so pre-tokenisation sees what the reference sees.
"""

import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import structlog
import tokenizers

from saccade.errors import InvalidValue, StartupError

_logger = structlog.get_logger(__name__)

MAX_TEXT_BYTES = 4 * 2**20
"""What is tokenised at a time: each byte may become a token, and tokens take far more memory than text."""

TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


class Segment(NamedTuple):
    """A piece of a rendered prompt: a special token that the template wrote, or text."""

    text: str
    is_special: bool


class Tokenizer:
    """Text to token ids and back, for one checkpoint.

    *tokenizer_json* is the content of tokenizer.json, *tokenizer_config* the parsed tokenizer_config.json ({} where
    there is none). *protected_ids* are treated as special whatever the files say: ids that stand for pictures.
    Raises StartupError where a file is wrong.
    """

    def __init__(
        self, tokenizer_json: bytes, tokenizer_config: Mapping[str, Any], protected_ids: Collection[int] = ()
    ) -> None:
        parsed = _parse(tokenizer_json)
        _require_byte_level(parsed)
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
        _merge_added_tokens(self._tokenizer, tokenizer_config)
        self.num_tokens: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.special_tokens: dict[str, int] = self._find_special_tokens(protected_ids)
        self._special_ids = frozenset(self.special_tokens.values())
        self._aliases = self._add_aliases()
        self._tokenizer.encode_special_tokens = True
        self._bytes_of: dict[int, bytes] = {}

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of *text*; no part of it is taken for a special token."""
        return self.encode([Segment(text, is_special=False)])

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Return the ids of a rendered prompt.

        Raises InvalidValue for more than MAX_TEXT_BYTES, and where text alone would become a special token.
        """
        text = "".join(self._aliases[text] if is_special else text for text, is_special in segments)
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise InvalidValue(f"The text has more than {MAX_TEXT_BYTES} bytes.")
        # Of the library's calls only those for batches let other threads run meanwhile.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._special_ids.isdisjoint(ids):
            raise InvalidValue("The text holds a special token of this model that cannot be read as text.")
        return [self._special_of.get(token_id, token_id) for token_id in ids]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of *token_ids*, special tokens shown as they are written."""
        return b"".join(self.token_bytes(token_id) for token_id in token_ids).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Tell whether *token_id* is a special token, or no token of this model at all."""
        return token_id in self._special_ids or not 0 <= token_id < self.num_tokens

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that *token_id* adds to a text; a character may spread over several tokens."""
        known = self._bytes_of.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.num_tokens else None
            known = self._bytes_of[token_id] = _to_bytes(token or "")
        return known

    def _find_special_tokens(self, protected_ids: Collection[int]) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        for token_id in protected_ids:
            content = self._tokenizer.id_to_token(token_id)
            if content is None:
                raise StartupError(f"tokenizer.json has no token with the id {token_id}, which stands for a picture.")
            if content not in special:
                flags = _flags(added[token_id]) if token_id in added else {}
                self._tokenizer.add_special_tokens([tokenizers.AddedToken(content, special=True, **flags)])
            special[content] = token_id
        return special

    def _add_aliases(self) -> dict[str, str]:
        """Give every special token a twin with the same flags and a name that cannot be guessed."""
        added = self._tokenizer.get_added_tokens_decoder()
        aliases = {content: secrets.token_hex(16) for content in self.special_tokens}
        twins = []
        for content, token_id in self.special_tokens.items():
            twins.append(tokenizers.AddedToken(aliases[content], special=False, **_flags(added[token_id])))
        self._tokenizer.add_tokens(twins)
        self._special_of = {
            self._tokenizer.token_to_id(alias): self.special_tokens[content] for content, alias in aliases.items()
        }
        return aliases


def special_variables(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like as a chat template may use them, from tokenizer_config.json."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        match tokenizer_config.get(name):
            case str(content) | {"content": str(content)}:
                found[name] = content
    return found


def _parse(tokenizer_json: bytes) -> Mapping[str, Any]:
    try:
        parsed = json.loads(tokenizer_json)
    except ValueError as error:
        raise StartupError("tokenizer.json is not valid JSON.") from error
    match parsed:
        case {"model": {"vocab": dict() | list()}}:
            return dict(parsed)
    raise StartupError("tokenizer.json holds no `model` with a `vocab`.")


def _require_byte_level(parsed: Mapping[str, Any]) -> None:
    """Byte-level decoding is a concatenation of bytes, which is what makes streaming exact."""
    decoder = parsed.get("decoder") or {}
    kinds = [part.get("type") for part in decoder.get("decoders", [decoder])]
    if kinds != ["ByteLevel"]:
        raise StartupError(f"tokenizer.json: the decoder {kinds} is not served yet; ByteLevel is.")


def _merge_added_tokens(tokenizer: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any]) -> None:
    """Add the special tokens that only tokenizer_config.json knows, under the ids it gives them."""
    missing: dict[int, tokenizers.AddedToken] = {}
    for key, entry in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        match entry:
            case {"content": str(content), "special": True}:
                flags = {flag: bool(entry[flag]) for flag in TOKEN_FLAGS if flag in entry}
                missing[_token_id(key)] = tokenizers.AddedToken(content, special=True, **flags)
            case {"content": str()}:
                continue
            case _:
                raise StartupError(f"tokenizer_config.json: `added_tokens_decoder` entry {key!r} has no `content`.")
    known = tokenizer.get_added_tokens_decoder()
    new = {token_id: missing[token_id] for token_id in sorted(missing) if token_id not in known}
    if not new:
        return
    tokenizer.add_special_tokens(list(new.values()))
    for token_id, token in new.items():
        if tokenizer.token_to_id(token.content) != token_id:
            raise StartupError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}; "
                f"in tokenizer.json it would be {tokenizer.token_to_id(token.content)}."
            )
    _logger.info("special tokens merged", source="tokenizer_config.json", tokens=[t.content for t in new.values()])


def _flags(token: tokenizers.AddedToken) -> dict[str, bool]:
    return {flag: getattr(token, flag) for flag in TOKEN_FLAGS}


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise StartupError(f"tokenizer_config.json: `added_tokens_decoder` key {key!r} is no id.") from error


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _to_bytes(token: str) -> bytes:
    """A token that is not written in the byte alphabet, such as an added token with a space, stands for itself."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
