"""Structured output with the openai SDK, against `saccade serve`. F13"""

import json
import re
import urllib.error
import urllib.request
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from chats import openai_messages, random_image
from pydantic import BaseModel, Field
from server import Server
from tables import table
from tool_calls import TOOLS, check_calls

pytestmark = pytest.mark.ci

MESSAGES = openai_messages(random_image(96, 96, 51), "Describe the image as JSON.")


class Shape(Enum):
    ROUND = "round"
    SQUARE = "square"


class Part(BaseModel):
    shape: Shape
    count: Annotated[int, Field(ge=0, le=9)]


class Card(BaseModel):
    shape: Shape
    is_red: bool
    parts: Annotated[list[Part], Field(max_length=2)]


def ask(server: Server, **options: Any) -> Any:
    extra = options.pop("extra_body", {})
    return server.client().chat.completions.create(
        model=server.model, messages=MESSAGES, **{"max_tokens": 400, "seed": 1, "extra_body": extra} | options
    )


def test_parse_with_pydantic(tiny_server: Server) -> None:
    completion = tiny_server.client().chat.completions.parse(
        model=tiny_server.model, messages=MESSAGES, response_format=Card, max_tokens=2000, seed=1
    )
    assert isinstance(completion.choices[0].message.parsed, Card)
    assert completion.choices[0].finish_reason == "stop"


def test_streams_hold_the_grammar(tiny_server: Server) -> None:
    schema = {"enum": ["one", "two", "three"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    chunks = list(ask(tiny_server, response_format=form, stream=True, n=3))
    for index in range(3):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert json.loads("".join(choice.delta.content or "" for choice in own)) in schema["enum"]
        assert own[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["left (a)", "right|b"]}, r"left \(a\)|right\|b"),
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"structured_outputs": {"choice": ["你好", "é"]}}, "你好|é"),
        ({"structured_outputs": {"regex": "(ab){2}"}, "ignore_eos": True, "min_tokens": 50}, "abab"),
    ],
)
def test_vllm_parameters_constrain_the_answer(extra: dict[str, Any], pattern: str, tiny_server: Server) -> None:
    choice = ask(tiny_server, extra_body=extra).choices[0]
    assert re.fullmatch(pattern, choice.message.content)
    assert choice.finish_reason == "stop"


def test_truncated_answer_has_finish_reason_length(tiny_server: Server) -> None:
    choice = ask(tiny_server, extra_body={"guided_regex": "[a-z]{99}"}, max_tokens=2).choices[0]
    assert choice.finish_reason == "length"


def test_dropped_keywords_are_named_in_a_header(tiny_server: Server) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    raw = tiny_server.client().chat.completions.with_raw_response.create(
        model=tiny_server.model, messages=MESSAGES, extra_body={"guided_json": schema}, max_tokens=200
    )
    assert "guided_json.uniqueItems" in raw.headers["x-saccade-warning"]


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "object", "properties": {"a": {"not": {}}}}, "response_format.json_schema.schema.properties.a.not"),
        ({"enum": []}, "response_format.json_schema.schema.enum"),
    ],
)
def test_unsupported_schema_is_refused_by_its_place(schema: Any, param: str, tiny_server: Server) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(tiny_server, response_format=form)
    assert error.value.param == param
    assert ask(tiny_server, max_tokens=2).choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_follow_the_grammar(stream: bool, tiny_server: Server) -> None:
    """A random model calls tools where it must, and its calls match their schemas."""
    named = {"type": "function", "function": {"name": TOOLS[1]["function"]["name"]}}
    for choice, names in (("required", None), (named, {TOOLS[1]["function"]["name"]})):
        for seed in range(2):
            check_calls(tiny_server, names, stream=stream, tool_choice=choice, seed=seed, n=2)


def test_strict_functions_constrain_optional_calls(tiny_server: Server, tiny_qwen3_vl: Path) -> None:
    """A random model writes text for ever; what it begins by the tag's token is a call that matches its schema."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    added = json.loads((tiny_qwen3_vl / "tokenizer.json").read_text())["added_tokens"]
    begin = next(token["id"] for token in added if token["content"] == "<tool_call>")
    choice = ask(tiny_server, tools=strict, logit_bias={str(begin): 100}, parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert len(choice.message.tool_calls) == 1
    assert ask(tiny_server, tools=strict, max_tokens=3).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_beside_tools_gives_calls_or_json(stream: bool, tiny_server: Server, tiny_qwen3_vl: Path) -> None:
    """A random model answers by the schema, and calls where the tag is likely; both are held."""
    added = json.loads((tiny_qwen3_vl / "tokenizer.json").read_text())["added_tokens"]
    begin = next(token["id"] for token in added if token["content"] == "<tool_call>")
    schema = {"enum": ["one", "two"]}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    check_calls(tiny_server, None, stream=stream, response_format=form, logit_bias={str(begin): 100})
    choice = ask(tiny_server, tools=TOOLS, response_format=form, logit_bias={str(begin): -100}).choices[0]
    assert json.loads(choice.message.content) in schema["enum"]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


def in_api(api: str, schema: dict[str, Any], model: str) -> dict[str, Any]:
    """A request for JSON of *schema* to one of the four APIs."""
    messages, form = [{"role": "user", "content": "Hi"}], {"type": "json_schema", "schema": schema}
    openai_form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    fields: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": messages, "response_format": openai_form, "max_tokens": 99},
        "completions": {"prompt": "Hi", "response_format": openai_form, "max_tokens": 99},
        "messages": {"messages": messages, "output_config": {"format": form}, "max_tokens": 99},
        "responses": {"input": "Hi", "text": {"format": {**form, "name": "n"}}, "max_output_tokens": 99},
    }
    return {"model": model, **fields[api]}


def posted(server: Server, api: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/{api}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.ci
@table(
    ("api", "place"),
    [
        ("chat/completions", "response_format.json_schema.schema"),
        ("completions", "response_format.json_schema.schema"),
        ("messages", "output_config.format.schema"),
        ("responses", "text.format.schema"),
    ],
)
def test_identifiers_and_faults_of_schemas_in_all_apis(api: str, place: str, tiny_server: Server) -> None:
    schema = {"$id": "order form", "$schema": "https://json-schema.org/draft-07/schema#", "enum": ["one", "two"]}
    assert posted(tiny_server, api, in_api(api, schema, tiny_server.name))[0] == 200
    lacking = {"type": "object", "properties": {}, "required": ["x"], "additionalProperties": False}
    status, answer = posted(tiny_server, api, in_api(api, lacking, tiny_server.name))
    assert status == 400
    assert f"`{place}.required` (x) cannot hold together with `{place}.additionalProperties`" in str(answer)
