"""What answers of Kimi-K3 must be, by the xgrammar that vLLM brings. # F13"""

import json
import subprocess
from pathlib import Path
from typing import Any

import kimi_k3_answers as k3
import msgspec
import pytest
from kimi_k3_answers import END, NOTHING, THOUGHT, argument, call, section
from vllm_server import environment

from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import try_constraint
from saccade.models.tool_formats.form import CallConstraint, ContentConstraint, FunctionConstraint
from saccade.models.tool_formats.kimi_k3 import TOKENS

pytestmark = pytest.mark.peers

ZOOM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "side": {"enum": ["left", 'ri"ght']},
        "box": {"type": "array", "items": {"$ref": "#/$defs/edge"}, "minItems": 2, "maxItems": 2},
        'a&b"': {"type": "string", "pattern": "^[ab]+$"},
        "text": {"type": "string"},
        "odd": {"type": "object", "patternProperties": {"^a": {"type": "string"}}, "additionalProperties": False},
    },
    "required": ["side", "box"],
    "additionalProperties": False,
    "$defs": {"edge": {"type": "integer", "minimum": 0, "maximum": 40}},
}
FUNCTIONS: dict[str, Any] = {
    "zoom": ZOOM,
    "wait-a.bit": {"type": "object", "properties": {}, "additionalProperties": False},
}
CARD = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
WAIT, BOTH = call("wait-a.bit"), (call("wait-a.bit"), call("wait-a.bit", number=2))
SIDE, BOX = argument("side", "string", "left"), argument("box", "array", "[1, 40]")


def tag(functions: dict[str, Any], must_call: bool, many: bool = True, content: Any = None) -> str:
    """The structural tag that the gateway sends."""
    listed = [FunctionConstraint(name, schema, f"tools.{name}") for name, schema in functions.items()]
    answer = None if content is None else ContentConstraint(json.dumps(content), "response_format")
    calls = CallConstraint(listed, TOKENS, must_call, many, answer)
    outcome = try_constraint(Constraint("tool_calls", msgspec.json.encode(calls).decode(), "tools"))
    assert outcome.grammar is not None
    return outcome.grammar.text


MUST, ONE, MAY = tag(FUNCTIONS, True), tag(FUNCTIONS, True, False), tag(FUNCTIONS, False)
CALLS_OR_JSON, JSON = tag(FUNCTIONS, False, content=CARD), tag({}, False, content=CARD)
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    MUST: {
        "allowed": (
            NOTHING + section(WAIT),
            THOUGHT + NOTHING + section(WAIT),
            NOTHING + section(*BOTH),
            NOTHING + section(call("zoom", SIDE, BOX)),
            NOTHING + section(call("zoom", argument("side", "string", 'ri"ght'), BOX)),
            NOTHING + section(call("zoom", SIDE, BOX, argument("a&amp;b&quot;", "string", "ab"))),
            NOTHING + section(call("zoom", SIDE, BOX, argument("text", "string", 'a < b <|x|> "q" & ü'))),
            NOTHING + section(call("zoom", SIDE, BOX, argument("odd", "object", '{"b": 1}'))),
        ),
        "refused": (
            "Yes." + NOTHING,
            "Yes." + NOTHING + section(WAIT),
            NOTHING,
            NOTHING + section(),
            NOTHING + section(call("shout")),
            NOTHING + section(call("zoom", SIDE)),
            NOTHING + section(call("zoom", SIDE, argument("box", "array", "[1, 41]"))),
            NOTHING + section(call("zoom", SIDE, BOX, argument("a&amp;b&quot;", "string", "abc"))),
            NOTHING + section(call("zoom", SIDE, BOX, argument("text", "string", f"a{k3.OPEN}b"))),
        ),
    },
    ONE: {"allowed": (NOTHING + section(WAIT),), "refused": (NOTHING + section(*BOTH),)},
    MAY: {
        "allowed": ("Yes." + NOTHING, THOUGHT + "Yes." + NOTHING + section(*BOTH), NOTHING + section(WAIT)),
        "refused": ("Yes." + NOTHING + section(call("shout")), f"Yes.{k3.OPEN}tools" + NOTHING),
    },
    CALLS_OR_JSON: {
        "allowed": ('{"n": 3}' + NOTHING, THOUGHT + '{"n": 3}' + NOTHING, NOTHING + section(WAIT)),
        "refused": ("Yes." + NOTHING, '{"n": 3}' + NOTHING + section(WAIT), NOTHING, '{"n": "3"}' + NOTHING),
    },
    JSON: {"allowed": (THOUGHT + '{"n": 3}' + NOTHING,), "refused": (NOTHING, NOTHING + section(WAIT), "3" + NOTHING)},
}  # fmt: skip


def test_answers_that_a_worker_allows() -> None:
    cases = [[tag, [answer + END for kind in asked.values() for answer in kind]] for tag, asked in CASES.items()]
    special = [k3.OPEN, k3.CLOSE, k3.SEP, k3.END_OF_MESSAGE]
    program = Path(__file__).with_name("xgrammar_matcher.py")
    done = subprocess.run(
        [environment() / "bin/python", program],
        input=json.dumps({"special": special, "cases": cases}),
        capture_output=True,
        text=True,
        check=True,
    )
    expected = [[kind == "allowed" for kind, answers in asked.items() for _ in answers] for asked in CASES.values()]
    assert json.loads(done.stdout) == expected
