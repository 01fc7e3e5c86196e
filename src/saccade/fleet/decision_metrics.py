"""Metrics of the router's choices between several workers, and how long they took."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

from saccade.fleet.pool import Model
from saccade.fleet.router import Booking
from saccade.fleet.worker import Worker
from saccade.protocol.exactness import Exactness
from saccade.telemetry import MODEL

Stage = Literal["keys", "lookup", "choice"]
STAGES: tuple[Stage, ...] = ("keys", "lookup", "choice")
"""Compute the keys of a prompt's blocks; look them up in the index; choose a worker and book there."""

_SHARES = tuple(step / 20 for step in range(21))
_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)

MAX_REASONS = 256
"""Reasons with a label of their own, and pairs of worker and reason in the log; a reason may quote a worker."""

OTHER_REASONS = "another reason"

logger = logging.getLogger(__name__)


class DecisionMetrics:
    """Metrics of the router's choices. *exactness_of* returns how exact a worker's index is now."""

    def __init__(self, registry: CollectorRegistry, exactness_of: Callable[[Worker], Exactness]) -> None:
        self._exactness_of = exactness_of
        self._logged_keys: set[tuple[str, str]] = set()
        self._reasons: set[str] = set()
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self._shares = histogram(
            "saccade_router_kv_hit_rate",
            "Share of a prompt's tokens in blocks that its worker had reported to hold when it was chosen.",
            MODEL,
            buckets=_SHARES,
        )
        seconds = histogram(
            "saccade_router_decision_seconds",
            "Time of one stage of the choice of a worker.",
            ("stage",),
            buckets=_SECONDS,
        )
        self._seconds = {stage: seconds.labels(stage) for stage in STAGES}
        self._inexact = counter(
            "saccade_router_inexact",
            "Requests that were placed without exact knowledge of the worker.",
            (*MODEL, "exactness", "reason"),
        )
        self._passed_over = counter(
            "saccade_router_non_max_overlap_selections",
            "Requests that were placed although another worker held more of the prompt.",
            MODEL,
        )
        self._blocks_lost = counter(
            "saccade_router_overlap_blocks_lost", "Blocks that those workers held more than the chosen ones.", MODEL
        )

    @contextlib.contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Record how long the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name].observe(time.perf_counter() - start)

    def observe(
        self, model: Model, worker: Worker, num_prompt_tokens: int, booking: Booking, choice_seconds: float
    ) -> float | None:
        """Record that a prompt for *model* was placed at *worker*, and that choosing took *choice_seconds*.

        Return the share of the prompt that its worker held, for first_token(), or None if that is not certain.
        """
        self._seconds["choice"].observe(choice_seconds)
        known = self._exactness_of(worker)
        if known.level != "EXACT":
            self._note_inexact(model, worker, known)
        if lost := booking.most_overlap_tokens - booking.overlap_tokens:
            self._passed_over.labels(model.name).inc()
            self._blocks_lost.labels(model.name).inc(lost / model.description.block_size)
        is_certain = known.level == "EXACT" and booking.matched_tokens is not None
        return (booking.matched_tokens or 0) / max(1, num_prompt_tokens) if is_certain else None

    def first_token(self, model: str, held_share: float | None) -> None:
        """Record, at a request's first token, the share that observe() returned for its placement."""
        if held_share is not None:
            self._shares.labels(model).observe(held_share)

    def forget(self, worker: str) -> None:
        """Let reasons about *worker* be logged again."""
        self._logged_keys = {key for key in self._logged_keys if key[0] != worker}

    def _note_inexact(self, model: Model, worker: Worker, known: Exactness) -> None:
        key, reason = (worker.url, known.reason), known.reason
        if key not in self._logged_keys and len(self._logged_keys) < MAX_REASONS:
            self._logged_keys.add(key)
            logger.info("routing: requests go to worker %s, whose caches are %s: %s", worker.url, known.level, reason)
        if len(self._reasons) < MAX_REASONS:
            self._reasons.add(reason)
        elif reason not in self._reasons:
            # The series of workers that are gone stay.
            reason = OTHER_REASONS
        self._inexact.labels(model.name, known.level, reason).inc()
