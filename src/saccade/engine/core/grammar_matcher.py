"""Computes which tokens an answer's grammar allows next. Does not import torch."""

import time
from array import array
from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt

from saccade.engine.core.grammar_lexers import CompiledGrammar
from saccade.errors import InvalidValue

WORD_BITS = 32
MAX_MASK_SECONDS = 1.0
"""The processor time for one mask, while every request waits; usual are tens of microseconds."""

MAX_LEXERS = 32
LEXERS_AT_A_TOKEN = 4
"""Lexers that one answer may take, and one of its tokens: each compiles the grammar, and follows the whole answer."""

Words = npt.NDArray[np.uint32]
"""A set of token ids: bit i % 32 of word i // 32 is set for token id i."""


def no_words(vocab_size: int) -> Words:
    """Return an empty set of token ids below *vocab_size*."""
    return np.zeros(-(-vocab_size // WORD_BITS), np.uint32)


def add_ids(words: Words, token_ids: Iterable[int], vocab_size: int) -> Words:
    """Return *words* plus those *token_ids* that are between 0 and *vocab_size* - 1."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


class GrammarMatcher:
    """Follows one answer. Its state depends only on the answer's tokens, so preemption does not change it.

    *usable* holds the ids that the request may draw at all. If the prompt ends within reasoning, all ids except
    *end_ids*, which end an answer, are allowed up to the token *reasoning_end_id*. If this or other answers have filled
    the lexer, the answer continues in another one.
    """

    def __init__(self, compiled: CompiledGrammar, reasoning_end_id: int | None, usable: Words, end_ids: Words) -> None:
        self._compiled = compiled
        self._lexer = compiled.lexer
        self._matcher = self._lexer.after(())
        self._token_ids = array("i")
        self._num_lexers = 1
        self._reasoning_end_id = reasoning_end_id
        self._is_reasoning = reasoning_end_id is not None
        self._usable = usable
        self._end_ids = end_ids

    def copy(self) -> "GrammarMatcher":
        """Return a matcher for another answer, at its beginning."""
        return GrammarMatcher(self._compiled, self._reasoning_end_id, self._usable, self._end_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the answer matches the grammar and no token can follow."""
        return not self._is_reasoning and self._matcher.is_stopped() and not self._matcher.is_error()

    def take_token(self, token_id: int) -> None:
        """Advance by the answer's next token, which the last mask must have allowed."""
        if self._is_reasoning:
            self._is_reasoning = token_id != self._reasoning_end_id
            return
        self._token_ids.append(token_id)
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            self._change_lexer()

    def masks_after(self, token_ids: Iterable[int]) -> list[bytes]:
        """Return the masks after each of *token_ids*, up to the first that cannot follow.

        The matcher does not advance.
        """
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()
        ahead._token_ids = self._token_ids[:]
        masks: list[bytes] = []
        for token_id in token_ids:
            if not ahead._is_reasoning and not ahead._matcher.validate_tokens([token_id]):
                break
            ahead.take_token(token_id)
            try:
                # After a complete answer no token is drawn that counts.
                masks.append(self._usable.tobytes() if ahead.is_finished else ahead.mask())
            except InvalidValue:
                break
        return masks

    def mask(self) -> bytes:
        """Return the ids that the next token may have, as the bytes of Words.

        Raises InvalidValue if there are none, or if they cannot be determined.
        """
        allowed = self._usable & (~self._end_ids if self._is_reasoning else self._allowed())
        if not allowed.any():
            raise InvalidValue("The answer's grammar allows none of the tokens that the request and the model allow.")
        return allowed.tobytes()

    def _allowed(self) -> Words:
        """Return the ids that the grammar allows. Raises InvalidValue if that takes too many lexers or too long."""
        allowed = np.zeros_like(self._usable)
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        for _ in range(LEXERS_AT_A_TOKEN):
            if not self._matcher.is_error() or not self._change_lexer():
                break
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error() or time.thread_time() - began > MAX_MASK_SECONDS:
            raise InvalidValue("The answer's grammar became too large while it was matched; make it simpler.")
        return allowed

    def _change_lexer(self) -> bool:
        """Replay the answer's tokens in a lexer with more room. Return whether there is such a lexer."""
        if self._num_lexers == MAX_LEXERS:
            return False
        self._num_lexers += 1
        self._lexer = self._compiled.replace(self._lexer)
        self._matcher = self._lexer.after(self._token_ids)
        return True
