"""What answers of Kimi-K3 must be: a structural tag, which xgrammar itself reads in tests/peers. # F13"""

import json
from typing import Any

import msgspec
import pytest
from tables import table

from saccade.errors import UnsupportedParameter
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.grammars import AnswerGrammar
from saccade.gateway.structured_output.trial import Outcome, try_constraint
from saccade.models.tool_formats.form import CallConstraint, ContentConstraint, FunctionConstraint
from saccade.models.tool_formats.kimi_k3 import TOKENS

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 3},
        "named": {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": False},
    },
}
NUMBER = {"type": "object", "properties": {"n": {"type": "string", "minLength": 1}}}


def tried(strict: bool = False, content: bool = False, **calls: Any) -> Outcome:
    """What the gateway's trial makes of calls of `look`, or of JSON beside them."""
    answer = ContentConstraint(json.dumps(NUMBER), "response_format", strict) if content else None
    functions = [] if strict and content else [FunctionConstraint("look", LOOK, "tools.look", strict)]
    asked = CallConstraint(functions, TOKENS, content=answer, **({"must_call": True, "many": True} | calls))
    return try_constraint(Constraint("tool_calls", msgspec.json.encode(asked).decode(), "tools"))


def elements(outcome: Outcome) -> list[Any]:
    assert outcome.grammar is not None
    assert outcome.grammar.kind == "structural_tag"
    parsed: list[Any] = json.loads(outcome.grammar.text)["format"]["elements"]
    return parsed


def test_workers_of_other_engines_take_it() -> None:
    grammar = tried().grammar
    assert grammar is not None
    assert not AnswerGrammar(grammar, "tool_choice").errors


def test_reasoning_then_the_response_then_calls_then_the_end() -> None:
    reasoning, answer, end = elements(tried())
    assert (reasoning["type"], reasoning["content"]["end"]) == (
        "optional",
        "<|close|>think<|sep|><|open|>response<|sep|>",
    )
    assert end["value"] == "<|close|>message<|sep|>"
    ((empty, section),) = (one["elements"] for one in answer["elements"])
    assert empty["value"] == "<|close|>response<|sep|>"
    assert (section["begin"], section["end"]) == ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>")
    (call,) = section["content"]["tags"]
    assert call["begin"] == '<|open|>call tool="look" index="'


@table("many", [True, False])
def test_one_call_or_several(many: bool) -> None:
    (_, section) = elements(tried(many=many))[1]["elements"][0]["elements"]
    assert section["content"]["stop_after_first"] is not many


def test_what_is_not_enforced_is_dropped() -> None:
    outcome = tried(content=True, must_call=False)
    assert outcome.dropped == [
        "tools.look.properties.text.maxLength",
        "tools.look.properties.named.patternProperties",
        "response_format.properties.n.minLength",
    ]
    (calls, content) = elements(outcome)[1]["elements"]
    arguments = calls["elements"][1]["content"]["tags"][0]["content"]["elements"][2]["json_schema"]["properties"]
    assert arguments == {"text": {"type": "string"}, "named": {"type": "object"}}
    assert content["content"]["json_schema"]["properties"] == {"n": {"type": "string"}}


@pytest.mark.parametrize(
    ("content", "param"),
    [(False, "tools.look.properties.text.maxLength"), (True, "response_format.properties.n.minLength")],
)
def test_a_strict_schema_is_enforced_or_refused(content: bool, param: str) -> None:
    outcome = tried(strict=True, content=content, must_call=not content)
    assert (outcome.code, outcome.param) == (UnsupportedParameter.code, param)
