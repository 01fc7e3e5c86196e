"""SamplingParams."""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from pydantic import BaseModel
from tables import table

from saccade import SamplingParams
from saccade.errors import InvalidValue
from saccade.llm.sampling import response_format_of


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


@table(
    ("values", "sentence"),
    [
        # JSON would have null in its place, which means the default.
        ({"top_p": float("nan")}, "`top_p` must be a finite number, not nan"),
        ({"temperature": -1}, "`temperature` must be a number, at least 0"),
        ({"temperature": 7}, "`temperature` must be a number, at most 2"),
        ({"n": 0}, "`n` must be"),
        ({"max_tokens": "many"}, "`max_tokens` must be"),
        ({"stop": [1]}, "`stop[0]` must be a string"),
        ({"logit_bias": object()}, "Sampling parameters are numbers, texts"),
    ],
)
def test_a_value_that_no_model_takes_is_refused_at_once(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        SamplingParams(**values)
    assert refused.value.message.startswith(sentence)


class Label(BaseModel):
    """What pydantic makes a schema of."""

    colour: str


@dataclass
class Shape:
    """What msgspec makes a schema of."""

    sides: int


def test_a_class_is_the_format_of_answers() -> None:
    made = response_format_of(Label)
    assert made == {"type": "json_schema", "json_schema": {"name": "Label", "schema": Label.model_json_schema()}}
    schema = response_format_of(Shape)["json_schema"]["schema"]
    assert schema["$defs"]["Shape"]["properties"] == {"sides": {"type": "integer"}}
    with pytest.raises(InvalidValue, match="and Random is none"):
        response_format_of(Random)
