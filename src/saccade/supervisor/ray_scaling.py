"""How many replicas a role has, by the prompt tokens that wait at its workers. Ray Serve's controller calls it."""

import math
from typing import Any

WAITING_TOKENS = "waiting_tokens"
"""What each replica reports: the prompt tokens that its worker has yet to compute."""


class WaitingTokens:
    """ceil(waiting prompt tokens / *target*) replicas. Serve keeps the number within min_replicas and max_replicas.

    Serve averages each replica's report over `look_back_period_s`, and delays each change by its own settings.
    """

    def __init__(self, target: int) -> None:
        if target < 1:
            raise ValueError("target must be at least 1: the waiting prompt tokens that one more replica is for")
        self._target = target

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for *context*, Serve's AutoscalingContext, and no state to keep."""
        reported = (context.aggregated_metrics or {}).get(WAITING_TOKENS, {})
        return math.ceil(sum(reported.values()) / self._target), {}
