"""Tries each request's grammar once, and caches the outcome.

Tenants share neither trials nor cached outcomes; otherwise an answer's timing would reveal other tenants' grammars.
"""

import asyncio
from collections.abc import Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from saccade.byte_lru import ByteLru
from saccade.errors import DeadlineExceeded, InternalError, RequestError, UnsupportedParameter, from_code
from saccade.fair_queue import FairQueue
from saccade.gateway.limited_child import ChildLimits
from saccade.gateway.memory_parts import MemoryPart
from saccade.gateway.single_flight import SingleFlight
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import LIMITS, Outcome, Trial
from saccade.protocol.needs import Need
from saccade.protocol.request import Grammar

CACHE_BYTES = 16 << 20
BYTES_BESIDE_TEXT = 1024
TRIALS_AT_A_TIME = 3
TRIALS_OF_A_CLIENT = TRIALS_AT_A_TIME - 1
"""One is kept for others: a trial may take seconds."""

MAX_WAITING = 64
WAIT_SECONDS = 60.0
"""How long a new grammar may wait for its trial."""

SAYS_NOTHING = (InternalError.code, DeadlineExceeded.code)
"""Failures of a child that say nothing about its grammar; the next request tries again."""


@dataclass(frozen=True)
class AnswerGrammar:
    """An answer's *grammar*, from the field *param*. It does not enforce the schema's keywords at *dropped*."""

    grammar: Grammar
    param: str
    dropped: list[str] = field(default_factory=list)

    @property
    def errors(self) -> Mapping[Need, RequestError]:
        """The error for workers that enforce no grammars; none for a structural tag."""
        if self.grammar.kind == "structural_tag":
            return {}
        field = self.param.split(".")[0]
        error = UnsupportedParameter(
            f"`{field}` is not served by this model's workers, which cannot enforce grammars; leave it out.",
            field,
        )
        return {Need.ENFORCED_GRAMMAR: error}


class RequestGrammars:
    """Tries constraints, each in a child and a few at a time, and caches the outcomes. Clients take turns."""

    def __init__(self, limits: ChildLimits = LIMITS) -> None:
        self._limits = limits
        self._outcomes: ByteLru[tuple[bytes, Constraint], Outcome] = ByteLru(CACHE_BYTES)
        self._flights = SingleFlight[tuple[bytes, Constraint], Outcome]()
        self._queue = FairQueue(
            TRIALS_AT_A_TIME,
            "new grammars",
            max_waiting=MAX_WAITING,
            wait_seconds=WAIT_SECONDS,
            client_capacity=lambda _: TRIALS_OF_A_CLIENT,
        )
        self._threads = ThreadPoolExecutor(TRIALS_AT_A_TIME, thread_name_prefix="grammar-trial")

    @property
    def memory_part(self) -> MemoryPart:
        """The memory of the cached outcomes."""
        return MemoryPart("grammars", CACHE_BYTES, lambda: self._outcomes.num_bytes)

    async def grammar_of(
        self, constraint: Constraint, salt: bytes = b"", client: Hashable = None, priority: int = 1
    ) -> AnswerGrammar:
        """Return the grammar for *constraint* and the tenant with *salt*; a trial takes one of *client*'s turns.

        A trial ends when the last request that waits for it is cancelled. Raises InvalidValue and UnsupportedParameter,
        which name the place, and QueueFull if too many wait or this one waits too long. Raises InternalError or
        DeadlineExceeded if the trial says nothing about the grammar.
        """
        key = salt, constraint
        outcome = self._outcomes.get(key)
        if outcome is None:
            outcome = await self._flights.join(key, self._tried, salt, constraint, client, priority)
        if outcome.grammar is None:
            raise from_code(outcome.code, outcome.message, outcome.param)
        return AnswerGrammar(outcome.grammar, constraint.param, outcome.dropped)

    def close(self) -> None:
        """Cancel trials that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _tried(self, salt: bytes, constraint: Constraint, client: Hashable, priority: int) -> Outcome:
        with await self._queue.enter(client, priority=priority):
            trial = Trial(constraint, self._limits)
            try:
                outcome = await asyncio.get_running_loop().run_in_executor(self._threads, trial.run_child)
            finally:
                trial.kill()
        if outcome.code not in SAYS_NOTHING:
            self._outcomes.put((salt, constraint), outcome, BYTES_BESIDE_TEXT + 4 * len(constraint.text))
        return outcome
