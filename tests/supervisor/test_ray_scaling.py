"""How many replicas a role on Ray has."""

from types import SimpleNamespace

import pytest
from tables import table

from saccade.supervisor.ray_scaling import WAITING_TOKENS, WaitingTokens


@table(
    ("reported", "num_replicas"),
    [
        ({}, 0),
        ({"a": 0.0, "b": 0.0}, 0),
        ({"a": 1.0}, 1),
        ({"a": 1000.0}, 1),
        ({"a": 1000.0, "b": 0.5}, 2),
        ({"a": 400.0, "b": 400.0, "c": 1700.0}, 3),
    ],
)
def test_one_replica_for_each_target_of_waiting_tokens(reported: dict[str, float], num_replicas: int) -> None:  # F11
    context = SimpleNamespace(aggregated_metrics={WAITING_TOKENS: reported})
    assert WaitingTokens(1000)(context) == (num_replicas, {})


@pytest.mark.parametrize("metrics", [None, {}, {"running_requests": {"a": 3.0}}])
def test_replicas_that_have_not_reported_count_nothing(metrics: dict[str, dict[str, float]] | None) -> None:
    assert WaitingTokens(1)(SimpleNamespace(aggregated_metrics=metrics)) == (0, {})


def test_a_target_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="target must be at least 1"):
        WaitingTokens(0)
