"""Adds the special tokens that tokenizer_config.json declares and tokenizer.json lacks."""

from collections.abc import Mapping
from typing import Any

import structlog
import tokenizers

from saccade.errors import StartupError

_logger = structlog.get_logger(__name__)

TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def declared_tokens(tokenizer_config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return tokenizer_config.json's `added_tokens_decoder` by id. Raises StartupError if it is malformed."""
    declared = tokenizer_config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise StartupError("tokenizer_config.json: `added_tokens_decoder` must be an object.")
    tokens: dict[int, Mapping[str, Any]] = {}
    for key, entry in declared.items():
        match entry:
            case {"content": str()}:
                tokens[_token_id(key)] = entry
            case _:
                raise StartupError(f"tokenizer_config.json: `added_tokens_decoder` entry {key!r} has no `content`.")
    return tokens


def merge_special_tokens(tokenizer: tokenizers.Tokenizer, tokenizer_config: Mapping[str, Any]) -> None:
    """Add the special tokens that only tokenizer_config.json has, with the ids that it gives. Raises StartupError.

    Entries that are not special are not added: as special tokens they would be removed from answers.
    """
    known = tokenizer.get_added_tokens_decoder()
    new = {
        token_id: tokenizers.AddedToken(entry["content"], special=True, **_flags(entry))
        for token_id, entry in sorted(declared_tokens(tokenizer_config).items())
        if entry.get("special") is True and token_id not in known
    }
    if not new:
        return
    tokenizer.add_special_tokens(list(new.values()))
    for token_id, token in new.items():
        if tokenizer.token_to_id(token.content) != token_id:
            raise StartupError(
                f"tokenizer_config.json gives {token.content!r} the id {token_id}, but "
                f"in tokenizer.json its id would be {tokenizer.token_to_id(token.content)}."
            )
    _logger.info("special tokens merged", source="tokenizer_config.json", tokens=[t.content for t in new.values()])


def _flags(entry: Mapping[str, Any]) -> dict[str, bool]:
    return {flag: bool(entry[flag]) for flag in TOKEN_FLAGS if flag in entry}


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError as error:
        raise StartupError(f"tokenizer_config.json: `added_tokens_decoder` key {key!r} is not an id.") from error
