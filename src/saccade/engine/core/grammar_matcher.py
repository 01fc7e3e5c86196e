"""Compute the tokens that an answer may have next under its grammar. No torch."""

import time
from collections.abc import Iterable
from copy import copy

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from saccade.errors import InvalidValue

WORD_BITS = 32
MAX_MASK_SECONDS = 1.0
"""The processor time for one mask, while every request waits; usual are tens of microseconds."""

Words = npt.NDArray[np.uint32]
"""A set of token ids: bit i % 32 of word i // 32 is set for token id i."""


def no_words(vocab_size: int) -> Words:
    """Return the empty set of token ids below *vocab_size*."""
    return np.zeros(-(-vocab_size // WORD_BITS), np.uint32)


def add_ids(words: Words, token_ids: Iterable[int], vocab_size: int) -> Words:
    """Return *words* plus the *token_ids* from 0 to *vocab_size* - 1."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    bits[[token_id for token_id in token_ids if 0 <= token_id < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


class GrammarMatcher:
    """Follows one answer. Its state depends on the answer's tokens only, so recomputed KV state does not change it.

    *matcher* is at the start of the grammar, and belongs to this object. *usable* are the ids that the request may draw
    at all. If the prompt ends within reasoning, all ids but *end_ids*, which end an answer, are allowed up to the token
    *reasoning_end_id*.
    """

    def __init__(self, matcher: LLMatcher, reasoning_end_id: int | None, usable: Words, end_ids: Words) -> None:
        self._pristine = matcher
        self._matcher = matcher.deep_copy()
        self._reasoning_end_id = reasoning_end_id
        self._is_reasoning = reasoning_end_id is not None
        self._usable = usable
        self._end_ids = end_ids

    def copy(self) -> "GrammarMatcher":
        """Return a matcher for another answer, at its beginning."""
        return GrammarMatcher(self._pristine, self._reasoning_end_id, self._usable, self._end_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the answer matches the grammar, and no token can follow."""
        return not self._is_reasoning and self._matcher.is_stopped() and not self._matcher.is_error()

    def take(self, token_id: int) -> None:
        """Advance by the answer's next token, which the last mask must have allowed."""
        if self._is_reasoning:
            self._is_reasoning = token_id != self._reasoning_end_id
        else:
            self._matcher.consume_token(token_id)

    def masks_after(self, token_ids: Iterable[int]) -> list[bytes]:
        """Return the masks after each of *token_ids*, up to the first that cannot follow. The matcher stays."""
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()
        masks: list[bytes] = []
        for token_id in token_ids:
            if not ahead._is_reasoning and not ahead._matcher.validate_tokens([token_id]):
                break
            ahead.take(token_id)
            try:
                # After a complete answer no token is drawn that counts.
                masks.append(self._usable.tobytes() if ahead.is_finished else ahead.mask())
            except InvalidValue:
                break
        return masks

    def mask(self) -> bytes:
        """Return the ids that the next token may have, as words. Raises InvalidValue if there are none."""
        if self._is_reasoning:
            allowed = self._usable & ~self._end_ids
        else:
            allowed = np.zeros_like(self._usable)
            began = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
            is_slow = time.thread_time() - began > MAX_MASK_SECONDS
            if is_slow or self._matcher.is_error():
                raise InvalidValue("The answer's grammar became too large while it was matched; make it simpler.")
            allowed &= self._usable
        if not allowed.any():
            raise InvalidValue("The answer's grammar allows none of the tokens that the request and the model allow.")
        return allowed.tobytes()
