"""Pick one of the workers that serve a model."""

from collections.abc import Mapping

from saccade.routing.load import WorkInFlight


def least_work(candidates: Mapping[str, WorkInFlight]) -> str:
    """Return the candidate with the least work in flight, the first of equals. *candidates* must not be empty."""
    return min(candidates, key=lambda name: candidates[name])
