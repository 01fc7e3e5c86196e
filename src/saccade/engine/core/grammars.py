"""Compiles requests' grammars in the background, and gives each answer a matcher. Does not import torch.

A single thread compiles, so that neither a step nor another request waits for the GIL or for a core. A request is
parked in the scheduler until its grammar is compiled.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import structlog
from llguidance import LLTokenizer

from saccade.byte_lru import ByteLru
from saccade.engine.core.grammar_lexers import CompiledGrammar, GrownLexers
from saccade.engine.core.grammar_matcher import GrammarMatcher, Words, add_ids, no_words
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.errors import InternalError, InvalidValue, SaccadeError
from saccade.grammars.compiler import Vocabulary
from saccade.protocol.request import Grammar
from saccade.tracebacks import traceback_of

CACHE_BYTES = 32 << 20
BYTES_PER_CHARACTER = 64
SMALLEST_BYTES = 256 << 10
"""A compiled grammar counts as this many bytes, or as BYTES_PER_CHARACTER of its text, whichever is more."""

logger = structlog.get_logger(__name__)


class _LoadedVocabulary(NamedTuple):
    """A vocabulary, and the sets of ids that matchers need."""

    tokenizer: LLTokenizer
    end_ids: Words


class Grammars:
    """Compiles grammars, and caches them.

    Its thread calls *read_vocabulary*, which reads the model's tokens and may raise StartupError. *vocab_size* is the
    number of logits. The sampler removes the ids in *never_drawn*. Requests in *pending* wait for their grammars.
    """

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int, never_drawn: Iterable[int] = ()
    ) -> None:
        self._vocab_size = vocab_size
        never = add_ids(no_words(vocab_size), never_drawn, vocab_size)
        self._drawable = add_ids(no_words(vocab_size), range(vocab_size), vocab_size) & ~never
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._loaded = self._thread.submit(self._load, read_vocabulary)
        self._compiled: ByteLru[tuple[bytes, str, str], Future[CompiledGrammar]] = ByteLru(CACHE_BYTES)
        self._grown = GrownLexers()
        self.pending: dict[tuple[int, str], Future[CompiledGrammar]] = {}

    def begin_grammar(self, sequence: Sequence, grammar: Grammar) -> None:
        """Compile *grammar* for the sequence's request, unless it is compiled already."""
        # Tenants do not share grammars: the time to the first token would tell one tenant about another's.
        key = (sequence.request.salt, grammar.kind, grammar.text)
        compiled = self._compiled.get(key)
        if compiled is None or _is_broken(compiled):
            compiled = self._thread.submit(self._compile, grammar)
            self._compiled.put(key, compiled, max(SMALLEST_BYTES, len(grammar.text) * BYTES_PER_CHARACTER))
        self.pending[(sequence.connection, sequence.request_id)] = compiled

    def give_up(self, connection: int, request_id: str) -> None:
        """Cancel the compilation for a request that has ended, unless it has begun or another request waits for it."""
        compiled = self.pending.pop((connection, request_id), None)
        if compiled is not None and compiled not in self.pending.values():
            compiled.cancel()

    def take_compiled(self, scheduler: Scheduler, timeout_seconds: float) -> None:
        """Queue the requests whose grammar is compiled, with matchers and first masks.

        Fail those whose grammar has an error.

        Wait at most *timeout_seconds* for a grammar.
        """
        if timeout_seconds and self.pending:
            wait(self.pending.values(), timeout_seconds, return_when="FIRST_COMPLETED")
        for key in [key for key, compiled in self.pending.items() if compiled.done()]:
            compiled = self.pending.pop(key)
            samples, error = scheduler.samples(*key), _error_of(compiled)
            try:
                for sequence in samples if error is None else ():
                    sequence.matcher = self._matcher(compiled.result(), sequence)
                    sequence.mask = sequence.matcher.mask()
            except InvalidValue as impossible:
                error = impossible.at("grammar")
            for sequence in samples:
                if error is not None:
                    scheduler.fail(sequence, error)
                elif sequence in scheduler.parked:
                    scheduler.resume(sequence)

    def close(self) -> None:
        """Give up on grammars that are not compiled yet."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, read_vocabulary: Callable[[], Vocabulary]) -> _LoadedVocabulary:
        vocabulary = read_vocabulary()
        end_ids = add_ids(no_words(self._vocab_size), vocabulary.eos_token_ids, self._vocab_size)
        return _LoadedVocabulary(vocabulary.build(), end_ids)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            return CompiledGrammar(self._loaded.result().tokenizer, grammar, self._grown)
        except InvalidValue as error:
            raise error.at("grammar") from None

    def _matcher(self, compiled: CompiledGrammar, sequence: Sequence) -> GrammarMatcher:
        reasoning_end_id = None if sequence.grammar is None else sequence.grammar.reasoning_end_id
        usable = self._drawable
        if allowed := sequence.sampling.allowed_token_ids:
            usable = usable & add_ids(no_words(self._vocab_size), allowed, self._vocab_size)
        return GrammarMatcher(compiled, reasoning_end_id, usable, self._loaded.result().end_ids)


def _is_broken(compiled: Future[CompiledGrammar]) -> bool:
    """Whether the grammar must be compiled again: it was given up, its lexer is full, or the compiler failed.

    A grammar that is invalid stays so, and is not compiled again.
    """
    if not compiled.done():
        return False
    if compiled.cancelled():
        return True
    error = compiled.exception()
    return compiled.result().is_full if error is None else not isinstance(error, InvalidValue)


def _error_of(compiled: Future[CompiledGrammar]) -> SaccadeError | None:
    error = compiled.exception()
    if error is None or isinstance(error, InvalidValue):
        return error
    logger.error("compiling a grammar failed", exception=traceback_of(error))
    return InternalError("The worker failed to compile the answer's grammar.")
