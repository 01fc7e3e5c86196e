"""The grammars of requests, tried once each and kept."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from saccade.byte_lru import ByteLru
from saccade.errors import DeadlineExceeded, InternalError, QueueFull, from_code
from saccade.gateway.structured_output import trial
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import Outcome, TrialLimits
from saccade.protocol.request import Grammar

CACHE_BYTES = 16 << 20
BYTES_BESIDE_TEXT = 1024
TRIALS_AT_A_TIME = 2
MAX_WAITING = 64
MAX_NAMES = 8
SAYS_NOTHING = (InternalError.code, DeadlineExceeded.code)
"""What a child that failed says about no grammar: the next request tries again."""


@dataclass(frozen=True)
class HeldAnswer:
    """The *grammar* that an answer is held to, from the field *param*; *warning* names what of it is not held."""

    grammar: Grammar
    param: str
    warning: str = ""


class RequestGrammars:
    """Tries constraints, each in a child, a few at a time; constraints that were tried before are known."""

    def __init__(self, limits: TrialLimits | None = None) -> None:
        self._limits = limits or TrialLimits()
        self._known: ByteLru[Constraint, Outcome] = ByteLru(CACHE_BYTES)
        self._running: dict[Constraint, asyncio.Future[Outcome]] = {}
        self._threads = ThreadPoolExecutor(TRIALS_AT_A_TIME, thread_name_prefix="grammar-trial")

    async def of(self, constraint: Constraint) -> HeldAnswer:
        """Return the grammar of *constraint*.

        Raises InvalidValue and UnsupportedParameter, which name the place, and QueueFull where many wait already.
        """
        outcome = self._known.get(constraint)
        if outcome is None:
            outcome = await self._tried(constraint)
        if outcome.grammar is None:
            raise from_code(outcome.code, outcome.message, outcome.param)
        return HeldAnswer(outcome.grammar, constraint.param, _warning(outcome.dropped))

    def close(self) -> None:
        """Give up trials that have not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _tried(self, constraint: Constraint) -> Outcome:
        running = self._running.get(constraint)
        if running is None:
            if len(self._running) >= MAX_WAITING:
                raise QueueFull("Many new grammars are waiting to be compiled; try again shortly.")
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._threads, trial.run, constraint, self._limits)
            self._running[constraint] = running
            running.add_done_callback(lambda _: self._running.pop(constraint, None))
        # A client that goes away must not end the trial for others that wait for it.
        outcome = await asyncio.shield(running)
        if outcome.code not in SAYS_NOTHING:
            self._known.put(constraint, outcome, BYTES_BESIDE_TEXT + 4 * len(constraint.text))
        return outcome


def _warning(dropped: list[str]) -> str:
    if not dropped:
        return ""
    more = f" and {len(dropped) - MAX_NAMES} more" if len(dropped) > MAX_NAMES else ""
    return f"keywords that the answer is not held to: {', '.join(dropped[:MAX_NAMES])}{more}"
