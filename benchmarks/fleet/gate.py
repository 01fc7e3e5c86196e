"""The gate of exact routing: repeats land where their images are cached, and what cannot be measured fails.

Two controls show that the gate can fail: workers that take turns, and a gateway whose keys are not the workers'.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.load import Asked, ask_all
from benchmarks.fleet.plan import Plan
from benchmarks.fleet.running import Gateway, NotMeasured

LEAST_RATE = 0.9
"""What the gate of Dynamo's router asks of the mean hit rate (ai-dynamo, pull request 9441)."""

ROUND_ROBIN_TOLERANCE = 0.05
MOST_BROKEN_RATE = 0.05
ROUNDING = 1e-6

Chats = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What the repeats of a plan came to.

    Rates are means over the repeats: *rate* by the router's histogram, *cached_rate* by the workers' own
    `cached_tokens`, *best_rate* of the most that can be cached, *unseen_rate* of an image that nobody has asked about.
    *num_observed* is how far the histogram's count has grown.
    """

    num_repeats: int
    num_observed: float
    rate: float
    cached_rate: float
    best_rate: float
    unseen_rate: float
    exactness: dict[str, str]
    exact_in_log: set[str]


def measure(gateway: Gateway, plan: Plan, chats: Chats) -> Outcome:
    """Ask everything once, then the repeats, and compare the histogram before and after these. Raises NotMeasured.

    The last of *chats* is not asked.
    """
    ask_all(gateway.url, chats, plan.first, plan.num_clients)
    gateway.wait_until_idle()
    before = gateway.hit_rates()
    answers = ask_all(gateway.url, chats, plan.repeats, plan.num_clients)
    after = gateway.hit_rates()
    workers = gateway.workers()
    (block_size,) = {worker["block_size"] for worker in workers}
    num_observed = after.count - before.count
    if not num_observed:
        raise NotMeasured("no repeat was counted in the histogram of hit rates")
    unseen = max(candidate["overlap_tokens"] for candidate in gateway.route(chats[-1])["candidates"])
    return Outcome(
        num_repeats=len(answers),
        num_observed=num_observed,
        rate=(after.total - before.total) / num_observed,
        cached_rate=_mean(answers, lambda one: one.cached_tokens / one.prompt_tokens),
        best_rate=_mean(answers, lambda one: one.best_rate(block_size)),
        unseen_rate=_mean(answers, lambda one: unseen / one.prompt_tokens),
        exactness={worker["url"]: worker["exactness"] for worker in workers},
        exact_in_log=gateway.exact_in_log(),
    )


def failures(outcome: Outcome) -> list[str]:
    """Return why *outcome* does not pass the gate; [] where it does."""
    checks = {
        f"the mean hit rate {outcome.rate:.4f} is below {LEAST_RATE}": outcome.rate >= LEAST_RATE,
        f"the mean hit rate {outcome.rate:.6f} is not the best possible, {outcome.best_rate:.6f}": (
            abs(outcome.rate - outcome.best_rate) <= ROUNDING
        ),
        f"the workers cached {outcome.cached_rate:.6f} of the prompts, the router counted {outcome.rate:.6f}": (
            abs(outcome.rate - outcome.cached_rate) <= ROUNDING
        ),
    }
    return [*not_measured(outcome), *(sentence for sentence, holds in checks.items() if not holds)]


def not_measured(outcome: Outcome) -> list[str]:
    """Return why the figures of *outcome* prove nothing, whatever they are; [] where they do."""
    checks = {
        f"the histogram grew by {outcome.num_observed:g}, not by the {outcome.num_repeats} repeats": (
            outcome.num_observed == outcome.num_repeats
        ),
        f"a worker is not EXACT in /workers: {outcome.exactness}": (
            bool(outcome.exactness) and set(outcome.exactness.values()) == {"EXACT"}
        ),
        f"a worker is not EXACT in the log, which names {sorted(outcome.exact_in_log)}": (
            set(outcome.exactness) <= outcome.exact_in_log
        ),
    }
    return [sentence for sentence, holds in checks.items() if not holds]


def round_robin_failures(outcome: Outcome, plan: Plan) -> list[str]:
    """Return why *outcome*, of workers that take turns, is not what a simulation gives; [] where it is."""
    simulated = plan.round_robin_rate(len(outcome.exactness), outcome.best_rate, outcome.unseen_rate)
    faults = not_measured(outcome)
    if abs(outcome.rate - simulated) > ROUND_ROBIN_TOLERANCE:
        faults.append(f"workers that take turns give {outcome.rate:.4f}, a simulation {simulated:.4f}")
    return faults


def broken_failures(outcome: Outcome) -> list[str]:
    """Return why *outcome*, of keys that name no block of any worker, is not near 0; [] where it is."""
    faults = not_measured(outcome)
    if outcome.rate > MOST_BROKEN_RATE:
        faults.append(f"keys of another tenant give {outcome.rate:.4f}")
    if not failures(outcome):
        faults.append("keys of another tenant pass the gate")
    return faults


def overlap_failures(gateway: Gateway, seen: dict[str, Any], unseen: dict[str, Any]) -> list[str]:
    """Return where *unseen*, which differs from *seen* in its image alone, overlaps more than the text before it.

    *seen* has been asked, *unseen* has not. Raises NotMeasured.
    """
    faults = []
    overlap, best, _ = _overlap(gateway, seen)
    if overlap != best:
        faults.append(f"an image that was seen overlaps {overlap} blocks of {best}")
    overlap, _, before = _overlap(gateway, unseen)
    if overlap > before:
        faults.append(f"an image that was not seen overlaps {overlap} blocks; {before} are before it")
    (answer,) = ask_all(gateway.url, [unseen], [0], 1)
    if answer.cached_tokens > before * gateway.workers()[0]["block_size"]:
        faults.append(f"{answer.cached_tokens} tokens of a prompt with an image that was not seen were cached")
    return faults


def _overlap(gateway: Gateway, chat: dict[str, Any]) -> tuple[int, int, int]:
    """Return the most blocks of *chat* that a worker holds, all that could be held, and those before its image."""
    route = gateway.route(chat)
    (image,), candidates = route["images"], route["candidates"]
    size = candidates[0]["block_size"]
    most = max(candidate["overlap_blocks"] for candidate in candidates)
    return most, (route["prompt_tokens"] - 1) // size, image["start"] // size


def _mean(answers: Sequence[Asked], rate: Callable[[Asked], float]) -> float:
    return statistics.fmean(map(rate, answers))
