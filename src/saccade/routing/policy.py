"""Pick one of the workers that serve a model, by the work that each has in flight."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, order=True)
class WorkInFlight:
    """What a gateway has sent to a worker and not yet got back. Ordered: fewer requests first, then fewer tokens."""

    num_requests: int = 0
    num_prompt_tokens: int = 0

    def plus(self, num_prompt_tokens: int) -> "WorkInFlight":
        """Return the work with one more request of *num_prompt_tokens*."""
        return WorkInFlight(self.num_requests + 1, self.num_prompt_tokens + num_prompt_tokens)

    def minus(self, num_prompt_tokens: int) -> "WorkInFlight":
        """Return the work without one request of *num_prompt_tokens*."""
        return WorkInFlight(self.num_requests - 1, self.num_prompt_tokens - num_prompt_tokens)


def least_work(candidates: Mapping[str, WorkInFlight]) -> str:
    """Return the candidate with the least work in flight, the first of equals. *candidates* must not be empty."""
    return min(candidates, key=lambda name: candidates[name])
