"""Bodies of /v1/completions: prompts of four forms, and what is refused by name."""

import json
from typing import Any

import pytest
from tables import table

from saccade.errors import InvalidValue, RequestError, UnsupportedParameter
from saccade.gateway.apis.completions.batch import CompletionBatch
from saccade.gateway.apis.completions.reader import parse_completion
from saccade.gateway.field_schemas import MAX_TOKENS
from saccade.protocol.request import MAX_NUM_SAMPLES


def asked(prompt: Any = "a", **fields: Any) -> CompletionBatch:
    read, warning = parse_completion(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())
    assert not warning
    return read


def refused(error: type[RequestError], param: str, words: str = "", **fields: Any) -> None:
    with pytest.raises(error) as raised:
        asked(**fields)
    assert raised.value.param == param
    assert words in raised.value.message


@table(
    ("prompt", "contents"),
    [
        ("a", {"prompt": "a"}),
        ("", {"prompt": ""}),
        (["a", "b"], {"prompt[0]": "a", "prompt[1]": "b"}),
        ([5, 6], {"prompt": [5, 6]}),
        ([[5, 6], [7]], {"prompt[0]": [5, 6], "prompt[1]": [7]}),
    ],
)
def test_prompts_of_every_form(prompt: Any, contents: dict[str, Any]) -> None:
    assert {one.field: one.content for one in asked(prompt).prompts} == contents


@table("prompt", [[], ["a", 5], [5, "a"], [5, [6]], [[5], "a"]])
def test_invalid_prompts_are_refused(prompt: Any) -> None:
    refused(InvalidValue, "prompt", prompt=prompt)


@table(
    ("prompt", "param"),
    [(None, "prompt"), (5, "prompt"), ({"a": 1}, "prompt"), ([-1], "prompt[...]"), ([1.5], "prompt")],
)
def test_values_that_are_no_prompt(prompt: Any, param: str) -> None:
    with pytest.raises(InvalidValue, match="prompt"):
        asked(prompt)


def test_the_number_of_answers_is_bounded() -> None:
    assert len(asked(["a"] * MAX_NUM_SAMPLES).prompts) == MAX_NUM_SAMPLES
    refused(InvalidValue, "prompt", prompt=["a"] * (MAX_NUM_SAMPLES + 1))
    refused(InvalidValue, "prompt", prompt=["a"] * (MAX_NUM_SAMPLES // 2 + 1), n=2)


def test_a_flood_of_ids_is_refused_before_it_is_decoded() -> None:
    body = b'{"model": "m", "prompt": [' + b"5," * MAX_TOKENS + b"5]}"
    with pytest.raises(InvalidValue, match="at most"):
        parse_completion(body)


def test_sampling_parameters_of_each_answer() -> None:
    assert asked().request.max_answer_tokens == 16
    assert asked(max_tokens=3).request.max_answer_tokens == 3
    assert asked(max_completion_tokens=3).request.max_answer_tokens == 3
    plain, scored = asked(n=2, stop=["b"]).request, asked(logprobs=0, echo=True).request
    assert (plain.n, plain.stop, plain.logprobs, plain.prompt_logprobs) == (2, ["b"], False, None)
    assert (scored.logprobs, scored.top_logprobs, scored.prompt_logprobs) == (True, 0, 0)
    assert asked(logprobs=2, echo=True, prompt_logprobs=4).request.prompt_logprobs == 4


@table(
    ("param", "error", "fields"),
    [
        ("suffix", UnsupportedParameter, {"suffix": "z"}),
        ("best_of", UnsupportedParameter, {"best_of": 2}),
        ("best_of", UnsupportedParameter, {"best_of": 1, "n": 2}),
        ("add_special_tokens", UnsupportedParameter, {"add_special_tokens": False}),
        ("messages", UnsupportedParameter, {"messages": [{"role": "user", "content": "a"}]}),
        ("tools", UnsupportedParameter, {"tools": [{}]}),
        ("images", UnsupportedParameter, {"images": ["a"]}),
        ("prompt_logprobs", InvalidValue, {"prompt_logprobs": 1, "stream": True}),
        ("logprobs", InvalidValue, {"logprobs": 21}),
        ("max_tokens", InvalidValue, {"max_tokens": 0}),
    ],
)
def test_refusals_name_the_field(param: str, error: type[RequestError], fields: dict[str, Any]) -> None:
    refused(error, param, f"`{param}`", **fields)


def test_values_that_change_nothing_are_taken() -> None:
    asked(suffix="", best_of=2, n=2, tools=[], user="me", echo=False, add_special_tokens=True, logit_bias=None)
