"""What steps cost, by what they took: estimates, and what fits beside decodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from saccade.engine.core.step_costs import Allowance, StepCosts, StepWork

DECODES = StepWork(True, 0, 0)
KNOWN = StepCosts(decodes=0.1, token=0.01, patch_layer=0.001)


@table(
    ("work", "seconds", "encode_seconds", "expected"),
    [
        (DECODES, 0.3, 0.0, StepCosts(0.2, 0.01, 0.001)),
        (StepWork(False, 10, 0), 0.3, 0.0, StepCosts(0.1, 0.02, 0.001)),
        (StepWork(True, 10, 0), 0.4, 0.0, StepCosts(0.1, 0.02, 0.001)),
        (StepWork(True, 0, 100), 0.4, 0.3, StepCosts(0.1, 0.01, 0.002)),
        (StepWork(True, 10, 100), 0.5, 0.3, StepCosts(0.1, 0.015, 0.0015)),
        (StepWork(False, 0, 0), 9.0, 0.0, KNOWN),
        (StepWork(True, 16, 100, projects=True), 9.0, 0.0, KNOWN),
    ],
)
def test_a_step_counts_half(work: StepWork, seconds: float, encode_seconds: float, expected: StepCosts) -> None:
    found = KNOWN.after(work, seconds, encode_seconds)
    assert (found.decodes, found.token, found.patch_layer) == pytest.approx(
        (expected.decodes, expected.token, expected.patch_layer)
    )


def test_first_measurements_count_whole() -> None:
    assert StepCosts().after(DECODES, 0.3, 0.0) == StepCosts(decodes=0.3)
    assert StepCosts().after(StepWork(False, 10, 100), 1.0, 0.8) == StepCosts(
        token=pytest.approx(0.02), patch_layer=0.008
    )


def test_what_is_known_tells_what_is_not() -> None:
    mixed = StepWork(True, 10, 100)
    found = StepCosts(0.1, token=0.01).after(mixed, 0.5, 9.0)
    assert found.patch_layer == pytest.approx(0.003)
    found = StepCosts(0.1, patch_layer=0.003).after(mixed, 0.5, 9.0)
    assert found.token == pytest.approx(0.01)


def test_a_fast_step_at_most_doubles_what_fits() -> None:
    costs = KNOWN.after(StepWork(True, 1000, 0), 0.1, 0.0)
    assert costs.token >= KNOWN.token / 2


def test_a_step_shows_that_its_decodes_take_no_longer() -> None:
    busy = StepCosts(decodes=0.6, token=0.01)
    # All but one of the answers have ended, and prompts leave no step to decodes alone.
    assert busy.after(StepWork(True, 16, 0), 0.2, 0.0).decodes == pytest.approx(0.2)
    assert busy.after(StepWork(False, 16, 0), 0.2, 0.0).decodes == 0.6


@table(
    ("costs", "seconds", "expected"),
    [
        (KNOWN, 0.0, None),
        (KNOWN, 0.5, Allowance(40, 400, 16)),
        (StepCosts(decodes=3.0, token=0.01, patch_layer=0.001), 0.5, Allowance(25, 250, 16)),
        (StepCosts(), 0.5, Allowance(16, 1, 16)),
        (StepCosts(decodes=0.1, token=1.0), 0.5, Allowance(16, 1, 16)),
    ],
)
def test_what_fits_beside_decodes(costs: StepCosts, seconds: float, expected: Allowance | None) -> None:
    assert costs.allowance(seconds, least_tokens=16) == expected


@given(
    st.builds(Allowance, st.integers(4, 5000), st.integers(1, 10**6), st.just(4)),
    st.integers(0, 6000),
    st.integers(0, 10**6),
)
def test_parts_of_both_are_no_more_than_one_alone(allowance: Allowance, tokens: int, patch_layers: int) -> None:
    beside = allowance.patch_layers_with(tokens)
    assert beside == 0 or tokens / allowance.tokens + beside / allowance.patch_layers <= 1 + 1e-9
    beside = allowance.tokens_with(patch_layers)
    share = beside / allowance.tokens + patch_layers / allowance.patch_layers
    assert beside == allowance.least_tokens or share <= 1 + 1e-9
