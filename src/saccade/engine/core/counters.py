"""Counters of an engine's work since its start, for load reports."""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS, Sums


class Counters(Sums, kw_only=True):
    """Sums since the start. The time for encoding images is also part of the network's time."""

    steps_by_tokens: list[int] = msgspec.field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))

    def count_step(self, num_tokens: int) -> None:
        """Count a step that computed *num_tokens*, which is at least one."""
        self.step_tokens_total += num_tokens
        self.steps_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def count_draft(self, num_tokens: int, num_accepted: int) -> None:
        """Count *num_tokens* proposed for a sequence in one step, *num_accepted* of which joined the answer."""
        self.drafts_total += 1
        self.draft_tokens_total += num_tokens
        self.accepted_tokens_total += num_accepted

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's wall-clock time in seconds to the field *name*."""
        began = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - began)
