"""Reads the bytes of a model's tokens from its files, for grammar masks."""

from collections.abc import Sequence
from functools import partial

from saccade import models
from saccade.errors import InvalidValue, StartupError
from saccade.grammars.compiler import Vocabulary
from saccade.models import files
from saccade.models.end_tokens import end_token_ids
from saccade.protocol.description import ModelFiles
from saccade.protocol.model_files import CONFIG, TIKTOKEN, TOKENIZER, TOKENIZER_CONFIG
from saccade.tokenization.loading import TokenizerNeeds, load_tokenizer
from saccade.tokenization.tokenizer import Tokenizer


def has_vocabulary(model_files: ModelFiles) -> bool:
    """Return whether *model_files* has a tokenizer and says which tokens end an answer."""
    family = models.families()[models.family_of(files.parse_json(model_files, CONFIG))]
    has_tokenizer = TOKENIZER in model_files.files or TIKTOKEN in model_files.files
    return has_tokenizer and bool(end_token_ids(model_files, family))


def read_vocabulary(model_files: ModelFiles, vocab_size: int) -> Vocabulary:
    """Return the tokens with ids below *vocab_size*, as the bytes that gateways show. Raises StartupError."""
    config = files.parse_json(model_files, CONFIG)
    family = models.families()[models.family_of(config)]
    needs = TokenizerNeeds(family.placeholder, family.placeholder_token_id(config), family.tiktoken_pattern)
    tokenizer = load_tokenizer(model_files.files, files.parse_json(model_files, TOKENIZER_CONFIG), needs)
    # Tags such as <think> and <tool_call> appear in answers, but are not text.
    tags = frozenset(tokenizer.special_tokens.values())
    special = [number for number in range(vocab_size) if number in tags or tokenizer.is_special(number)]
    # llguidance knows special tokens by their names in <>; ids outside the tokenizer have none.
    tokens = [tokenizer.bytes_of[token_id] for token_id in range(min(vocab_size, tokenizer.num_tokens))]
    tokens += [b""] * (vocab_size - len(tokens))
    for token_id in special:
        tokens[token_id] = b"<special %d>" % token_id
    ends = [token_id for token_id in end_token_ids(model_files, family) if token_id < vocab_size]
    if not ends:
        raise StartupError("No token of the model ends an answer, so no answer can follow a grammar.")
    return Vocabulary(tokens, special, ends, partial(_encode, tokenizer))


def _encode(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Return the ids of *text*, or none if they would be special tokens."""
    try:
        return tokenizer.encode_text(text)
    except InvalidValue:
        return ()
