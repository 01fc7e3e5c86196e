"""SamplingParams."""

import pytest
from tables import table

from saccade import SamplingParams
from saccade.errors import InvalidValue


@table(
    ("params", "fields"),
    [
        (SamplingParams(), {}),
        (SamplingParams(temperature=0, stop=["."]), {"temperature": 0, "stop": ["."]}),
        (SamplingParams(logprobs=3), {"logprobs": True, "top_logprobs": 3}),
        (SamplingParams(logprobs=True), {"logprobs": True}),
        (SamplingParams(logprobs=0), {"logprobs": True, "top_logprobs": 0}),
    ],
)
def test_params_are_fields_of_a_request(params: SamplingParams, fields: dict[str, object]) -> None:
    assert params.fields() == fields


def test_unknown_param_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


def test_a_number_that_json_lacks_is_named() -> None:
    """JSON would have null in its place, which means the default."""
    with pytest.raises(InvalidValue, match="`top_p` must be a finite number, not nan"):
        SamplingParams(top_p=float("nan")).fields()
