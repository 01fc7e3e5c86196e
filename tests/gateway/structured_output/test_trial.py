"""New grammars are tried in a child that can be ended."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grammar_trials import children

from saccade.errors import DeadlineExceeded, InternalError, InvalidValue, UnsupportedParameter
from saccade.gateway.limited_child import ChildLimits
from saccade.gateway.structured_output import grammars, trial
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.grammars import RequestGrammars
from saccade.gateway.structured_output.trial import LIMITS, Outcome, Trial
from saccade.protocol.request import Grammar

PARAM = "response_format.json_schema.schema"
ENDLESS = {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in "abcdefghijklmnopqrstuv"]}
"""Takes minutes to compile, and memory: each pattern doubles the states."""


def constraint(schema: Any, strict: bool = False) -> Constraint:
    return Constraint("json_schema", json.dumps(schema), PARAM, strict)


def test_a_child_compiles() -> None:  # F13
    outcome = Trial(constraint({"type": "array", "uniqueItems": True}), LIMITS).run_child()
    assert outcome == Outcome(Grammar("json_schema", '{"type":"array"}'), [f"{PARAM}.uniqueItems"])


def test_an_endless_schema_is_a_clients_error() -> None:  # F13
    outcome = Trial(constraint(ENDLESS), ChildLimits(0.7, LIMITS.memory_bytes)).run_child()
    assert (outcome.code, outcome.param) == (InvalidValue.code, PARAM)


def test_memory_is_limited() -> None:
    outcome = Trial(constraint(ENDLESS), ChildLimits(seconds=20, memory_bytes=1 << 20)).run_child()
    assert (outcome.code, outcome.param) == (InvalidValue.code, PARAM)


def test_a_child_that_fails_is_no_clients_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "PROGRAM", "saccade.no_such_module")
    assert Trial(constraint({}), LIMITS).run_child().code == InternalError.code


DEATHS = {
    "as it starts": "",
    "before its outcome": "sys.stdin.buffer.read()",
    "in its outcome": "os.write(1, b'\\x96')",
    "after its outcome": f"os.write(1, {msgspec.msgpack.encode(Outcome(Grammar('regex', 'b')))!r})",
}


async def test_a_killed_child_says_nothing_about_the_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = RequestGrammars()
    with monkeypatch.context() as killed:
        killed.setenv("PYTHONPATH", str(tmp_path))
        killed.setattr(trial, "PROGRAM", "dying")
        for death in DEATHS.values():
            (tmp_path / "dying.py").write_text(f"import os\nimport sys\n{death}\nos.kill(os.getpid(), 9)\n")
            with pytest.raises(InternalError):
                await subject.grammar_of(constraint({"type": "boolean"}))
            assert not children()
    assert (await subject.grammar_of(constraint({"type": "boolean"}))).grammar.text == '{"type":"boolean"}'
    subject.close()


async def test_a_starved_child_says_nothing_about_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = RequestGrammars()
    with monkeypatch.context() as starved:
        starved.setattr(trial, "START_SECONDS", -LIMITS.seconds)
        with pytest.raises(DeadlineExceeded):
            await subject.grammar_of(constraint({"type": "boolean"}))
    assert (await subject.grammar_of(constraint({"type": "boolean"}))).grammar.text == '{"type":"boolean"}'
    subject.close()


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (Constraint("regex", "a+", "guided_regex"), "regex", "a+"),
        (Constraint("grammar", 'start: "a"', "guided_grammar"), "lark", 'start: "a"'),
        (Constraint("grammar", 'root ::= "a"', "guided_grammar"), "lark", '%llguidance {}\n\nstart: "a"\n'),
    ],
)
def test_other_kinds(given: Constraint, kind: str, text: str) -> None:
    outcome = trial.try_constraint(given)
    assert outcome.grammar is not None
    assert (outcome.grammar.kind, outcome.grammar.text) == (kind, text)


@pytest.mark.parametrize("text", ["(a", r"(a)\1", "a(?=b)", "((a{100}){100}){100}"])
def test_regular_expressions_that_cannot_be_held(text: str) -> None:
    outcome = trial.try_constraint(Constraint("regex", text, "guided_regex"))
    assert (outcome.code, outcome.param) == (InvalidValue.code, "guided_regex")


@pytest.mark.parametrize(
    "text",
    [
        "oh no {",
        "",
        'a ::= "b"',
        "root ::= missing",
        'root ::= "a" | (missing)*',
        'root ::= a-b a_b\na-b ::= "a"\na_b ::= "b"',
        'root ::= start\nstart ::= "a"',
        'root ::= "\\',
        "root ::= " + "(" * 3000,
    ],
)
def test_a_grammar_that_is_none(text: str) -> None:
    outcome = trial.try_constraint(Constraint("grammar", text, "guided_grammar"))
    assert (outcome.code, outcome.param) == (InvalidValue.code, "guided_grammar")


async def test_a_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Constraint] = []

    class Counted(Trial):
        def __init__(self, given: Constraint, limits: ChildLimits) -> None:
            tried.append(given)
            super().__init__(given, limits)

    monkeypatch.setattr(grammars, "Trial", Counted)
    subject = RequestGrammars()
    wanted, refused = constraint({"uniqueItems": True}), constraint({"not": {}}, strict=True)
    first, second = await asyncio.gather(subject.grammar_of(wanted), subject.grammar_of(wanted))
    assert first == second == await subject.grammar_of(wanted)
    assert first.dropped == [f"{PARAM}.uniqueItems"]
    for _ in range(2):
        with pytest.raises(UnsupportedParameter):
            await subject.grammar_of(refused)
    assert tried == [wanted, refused]
    subject.close()
