"""Compiles a grammar with llguidance, within limits on time and memory.

Compilation releases the GIL, so it belongs on a thread. A thread cannot be stopped, though, and the limits bound the
work of the lexer and the parser, but not every regular expression. A child process therefore tries clients' grammars
first (gateway.structured_output).
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from saccade.errors import InvalidValue
from saccade.protocol.request import Grammar

MAX_LEXER_STATES: Final = 20_000
"""States of the lexer that copies of a matcher share; each takes up to a kilobyte. A bounded text needs one for each of
its bytes, and masks need some more around it.
"""

LIMITS: Final = LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=MAX_LEXER_STATES,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Below the library's defaults, because a step of the engine waits: for one mask, tens of milliseconds at most."""

WHITE_SPACE: Final = r"\x20|(\r?\n){1,2}[\x20\t]{0,20}"
"""White space between the values of JSON: a space, or line breaks and an indentation, as in llama.cpp's grammars. With
more room, a model that likes white space writes little else until its tokens are spent.
"""

TOO_LARGE: Final = (
    "The grammar is wrong, impossible or too large: it must be satisfiable, and may have at most some thousands of "
    "properties, values and patterns."
)


FOLLOWED_TOKENS: Final = 64
"""Tokens for which the lexer's fuel for one mask suffices: each byte takes 4 to 60 units of it."""

TRIED_TOKENS: Final = 64
SLOW_SECONDS: Final = 0.1
"""Processor time for the mask of one token; common grammars take less than a hundredth of it."""


FIRST_TAG_ID: Final = 257
NUM_TAGS: Final = 9
"""Tokens in byte_vocabulary() for the tags of a form of tool calls, in addition to the bytes and the end."""


DIVIDED_CHARACTERS: Final = 256
"""Characters of a required text that are divided into its tokens: without a bound, a long `const` delays every step."""


class Vocabulary:
    """The bytes of a model's tokens, from which llguidance builds its tokenizer.

    *tokens* holds the bytes of each token id, or no bytes if an answer never contains the token. *special_token_ids*
    never match a grammar's text. *encode* splits text into tokens as the model does. When a grammar allows only one
    text, such as a property's name, the answer has the tokens that *encode* returns. Without *encode*, it has one token
    for each byte. Building the LLTokenizer for 150,000 tokens takes 0.7 seconds and holds the GIL throughout.
    """

    is_tokenizer_wrapper = True
    """The mark that llguidance looks for before it reads the attributes above."""

    bos_token_id: int | None = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]] = lambda _: (),
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_ids = eos_token_ids
        self.eos_token_id = eos_token_ids[0]
        self._encode = encode
        self._id_of_byte = {token[0]: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the token ids of *text*, or of its beginning if it is long: a mask needs only the first token."""
        beginning = text[:DIVIDED_CHARACTERS]
        content = beginning.encode() if isinstance(beginning, str) else beginning
        # A tokenizer may add a token or a space at the start of a text; it adds none after a line break.
        for before in ("", "\n"):
            ids = self._last(self._encode(before + content.decode(errors="replace")), content)
            if ids:
                return ids
        return [self._id_of_byte[byte] for byte in content if byte in self._id_of_byte]

    def _last(self, token_ids: Sequence[int], content: bytes) -> list[int]:
        """Return the last *token_ids* whose joined bytes are *content*, or [] if the ids do not end with it."""
        ids, left = list[int](), len(content)
        for token_id in reversed(token_ids):
            if left <= 0:
                break
            ids.append(token_id)
            left -= len(self.tokens[token_id])
        ids.reverse()
        return ids if b"".join(self.tokens[token_id] for token_id in ids) == content else []

    def build(self) -> LLTokenizer:
        """Return llguidance's tokenizer."""
        return LLTokenizer(self, eos_token=list(self.eos_token_ids))  # type: ignore[arg-type]


def byte_vocabulary() -> LLTokenizer:
    """Return a tokenizer for the 256 bytes, an end token and tags, to try grammars without a model."""
    special = range(256, FIRST_TAG_ID + NUM_TAGS)
    names = (b"<special %d>" % token_id for token_id in special)
    return Vocabulary([*(bytes([byte]) for byte in range(256)), *names], special, [256]).build()


def compile_grammar(vocabulary: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return a matcher at the start of *grammar*. Copies of it match the answers.

    Raises InvalidValue, which names no field, if the grammar is wrong or too large, or if a token's mask takes too
    long.
    """
    matcher = LLMatcher(vocabulary, source(grammar), limits=LIMITS, log_level=0)
    if not matcher.is_error():
        _walk(matcher.deep_copy())
    if matcher.is_error():
        raise InvalidValue(TOO_LARGE)
    return matcher


def compile_again(vocabulary: LLTokenizer, grammar: Grammar, max_lexer_states: int) -> LLMatcher:
    """Return another matcher, with its own lexer, at the start of a *grammar* that has compiled before.

    Its masks may take several times as long as LIMITS allow, because an answer has already begun.
    """
    limits = LLParserLimits(
        max_items_in_row=LIMITS.max_items_in_row,
        initial_lexer_fuel=LIMITS.initial_lexer_fuel,
        step_lexer_fuel=10 * LIMITS.step_lexer_fuel,
        step_max_items=5 * LIMITS.step_max_items,
        max_lexer_states=max_lexer_states,
        max_grammar_size=LIMITS.max_grammar_size,
        verbose_errors=False,
    )
    return LLMatcher(vocabulary, source(grammar), limits=limits, log_level=0)


def follow(matcher: LLMatcher, token_ids: Sequence[int]) -> None:
    """Advance *matcher* by an answer's tokens, as far as possible.

    Computing a mask renews the lexer's fuel, so this computes one after every FOLLOWED_TOKENS tokens.
    """
    for start in range(0, len(token_ids), FOLLOWED_TOKENS):
        matcher.compute_bitmask()
        if not matcher.consume_tokens(list(token_ids[start : start + FOLLOWED_TOKENS])):
            return


def _walk(matcher: LLMatcher) -> None:
    """Follow one match for up to TRIED_TOKENS tokens. This also builds lexer states that copies share.

    Raises InvalidValue if a mask fails or takes too long. The limits do not bound every mask: with nested counted
    repetitions, one can take seconds.
    """
    for index in range(TRIED_TOKENS):
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        if time.thread_time() - began > SLOW_SECONDS:
            raise InvalidValue("The grammar takes too long for each token; avoid repetitions within repetitions.")
        if matcher.is_error():
            raise InvalidValue(TOO_LARGE)
        allowed = [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]
        if not allowed or not matcher.consume_token(allowed[7 * index % len(allowed)]):
            return
        if matcher.is_stopped():
            return


def source(grammar: Grammar) -> str:
    """Return *grammar* in llguidance's own form. Raises InvalidValue for a structural tag, or for an invalid schema."""
    if grammar.kind == "structural_tag":
        raise InvalidValue("A structural tag is for workers of other engines.")
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    try:
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_pattern": WHITE_SPACE})
    except ValueError as error:
        raise InvalidValue("A JSON schema must be a JSON object.") from error
