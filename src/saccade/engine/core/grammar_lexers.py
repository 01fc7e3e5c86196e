"""Compiled grammars, and the lexers that their answers share. Does not import torch.

llguidance's lexer creates states on demand and never drops one. All copies of a matcher share them, so the states of
several answers add up. Once a lexer is full, every copy fails for good. An answer then moves to a new lexer with room
for more states, and replays its tokens. Masks need five to eight states for each character of a bounded text, while a
replay needs one for each byte. So most of a new lexer's room is still free after the replay.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from saccade.grammars.compiler import MAX_LEXER_STATES, compile_again, compile_grammar, follow
from saccade.protocol.request import Grammar

GROWTH = 4
LARGEST_LEXER = 160_000
"""States of the largest lexer: enough for answers with about as many bytes in bounded texts, and 120 MiB."""

GROWN_STATES = 640_000
"""States that all larger lexers of an engine may have together, half a GiB."""


@dataclass(frozen=True, eq=False)
class Lexer:
    """A *matcher* at the start of a grammar; its copies share up to *max_states* lexer states."""

    matcher: LLMatcher
    max_states: int

    def after(self, token_ids: Sequence[int]) -> LLMatcher:
        """Return a copy of the matcher after *token_ids*; the copy is in an error state if the lexer is full."""
        matcher = self.matcher.deep_copy()
        follow(matcher, token_ids)
        return matcher


class GrownLexers:
    """An engine's larger lexers; each lives as long as an answer uses it."""

    def __init__(self) -> None:
        self._alive = weakref.WeakSet[Lexer]()

    def add_lexer(self, tokenizer: LLTokenizer, grammar: Grammar, max_states: int) -> Lexer:
        """Return a new lexer for *grammar* with *max_states*, or fewer if there is too little room."""
        room = GROWN_STATES - sum(lexer.max_states for lexer in self._alive)
        max_states = max(MAX_LEXER_STATES, min(max_states, LARGEST_LEXER, room))
        lexer = Lexer(compile_again(tokenizer, grammar, max_states), max_states)
        self._alive.add(lexer)
        return lexer


class CompiledGrammar:
    """A compiled grammar. New answers use its newest *lexer*.

    `is_full` says whether new answers would need another lexer. Raises InvalidValue if the grammar does not compile.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: Grammar, grown: GrownLexers) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self._grown = grown
        self._first = Lexer(compile_grammar(tokenizer, grammar), MAX_LEXER_STATES)
        self._newest = weakref.ref(self._first)
        self._is_first_full = False

    @property
    def lexer(self) -> Lexer:
        """The newest lexer in use, else the first."""
        return self._newest() or self._first

    @property
    def is_full(self) -> bool:
        return self._is_first_full and self.lexer is self._first

    def replace(self, full: Lexer) -> Lexer:
        """Return a lexer to replace a *full* one: the newest, if other answers already use it, or a new one."""
        if full is not self.lexer:
            return self.lexer
        self._is_first_full = True
        lexer = self._grown.add_lexer(self._tokenizer, self._grammar, GROWTH * full.max_states)
        self._newest = weakref.ref(lexer)
        return lexer
