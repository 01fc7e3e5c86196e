"""Grammars of tool calls: what they allow is read as calls that match the functions' schemas."""

import json
import random
from typing import Any

import jsonschema
import msgspec
import pytest
from tables import table

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.structured_output.constraint import Constraint
from saccade.gateway.structured_output.trial import Outcome, try_constraint
from saccade.grammars.compiler import FIRST_TAG_ID, byte_vocabulary, compile_grammar
from saccade.models.tool_formats import FORMATS
from saccade.models.tool_formats.form import CallConstraint, ContentConstraint, FunctionConstraint, ToolCallTokens
from saccade.protocol.request import Grammar

BEGIN, END, SECTION, SECTION_END, SEPARATOR, KEY, KEY_END, VALUE, VALUE_END = range(FIRST_TAG_ID, FIRST_TAG_ID + 9)
INNER = {KEY: b"<arg_key>", KEY_END: b"</arg_key>", VALUE: b"<arg_value>", VALUE_END: b"</arg_value>"}
"""Tags within a call, which gateways show to its parser."""
FORMS = {
    "hermes": ToolCallTokens("hermes", BEGIN, END),
    "qwen3_coder": ToolCallTokens("qwen3_coder", BEGIN, END),
    "glm45": ToolCallTokens("glm45", BEGIN, END, None, None, None, KEY, KEY_END, VALUE, VALUE_END),
    "kimi_k2": ToolCallTokens("kimi_k2", BEGIN, END, SECTION, SECTION_END, SEPARATOR),
    "gemma4": ToolCallTokens("gemma4", BEGIN, END, separator_id=SEPARATOR),
}
END_OF_ANSWER = 256
ZOOM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "side": {"enum": ["left", 'ri"ght']},
        "box": {"type": "array", "items": {"$ref": "#/$defs/edge"}, "minItems": 2, "maxItems": 2},
        "deep": {"type": ["boolean", "null"]},
    },
    "required": ["side", "box"],
    "additionalProperties": False,
    "$defs": {"edge": {"type": "integer", "minimum": 0, "maximum": 40}},
}
SAY: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
FUNCTIONS = {"zoom": ZOOM, "wait-a.bit": {"type": "object", "properties": {}, "additionalProperties": False}}


def grammar(form: str, functions: dict[str, Any], must_call: bool = True, many: bool = True, **held: Any) -> Grammar:
    """Return what the gateway's trial makes of these calls. Raises what the gateway raises."""
    listed = [FunctionConstraint(name, schema, f"tools.{name}", **held) for name, schema in functions.items()]
    calls = CallConstraint(listed, FORMS[form], must_call, many)
    outcome = try_constraint(Constraint("tool_calls", msgspec.json.encode(calls).decode(), "tools"))
    if outcome.grammar is None:
        raise {"unsupported_parameter": UnsupportedParameter}.get(outcome.code, InvalidValue)(
            outcome.message, outcome.param or ""
        )
    return outcome.grammar


def allows(held: Grammar, *pieces: str | int) -> bool:
    """Whether an answer of texts and tags may end behind *pieces*."""
    matcher = compile_grammar(byte_vocabulary(), held)
    ids = [token for piece in pieces for token in ([piece] if isinstance(piece, int) else piece.encode())]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def drawn(held: Grammar, seed: int) -> list[int]:
    """Return the ids of a random answer that matches *held*, without its end."""
    draw, matcher, ids = random.Random(seed), compile_grammar(byte_vocabulary(), held), list[int]()
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]
        # Tags and the end come as soon as they may, and there are no spaces where none are needed.
        few = [token for token in allowed if token >= END_OF_ANSWER]
        few = few or [token for token in allowed if chr(token) not in " \t\r\n"]
        ids.append(draw.choice(few or allowed))
        matcher.consume_token(ids[-1])
    return [token for token in ids if token != END_OF_ANSWER]


def parsed(form: str, ids: list[int]) -> list[tuple[str, Any]]:
    """Read the calls in *ids*, as the gateway does."""
    calls, parts = [], list[list[int]]()
    for token in ids:
        if token == BEGIN:
            parts = [[]]
        elif token == SEPARATOR:
            parts.append([])
        elif token == END:
            call = FORMATS[form].parse(
                [b"".join(INNER.get(token) or bytes([token]) for token in part).decode() for part in parts],
                {name: {"parameters": s} for name, s in FUNCTIONS.items()},
            )
            assert call is not None
            calls.append((call.name, json.loads(call.arguments)))
            parts = []
        elif parts:
            parts[-1].append(token)
    return calls


@pytest.mark.ci
@table("form", FORMS)
@table("must_call", [True, False])
@table("many", [True, False])
def test_allowed_text_is_read_as_matching_calls(form: str, must_call: bool, many: bool) -> None:  # F13
    held = grammar(form, FUNCTIONS, must_call, many)
    seen = set()
    for seed in range(20):
        calls = parsed(form, drawn(held, seed))
        assert len(calls) >= must_call
        assert many or len(calls) <= 1
        for name, arguments in calls:
            jsonschema.validate(arguments, FUNCTIONS[name])
            seen.add(name)
    assert seen == set(FUNCTIONS)


CALLS: dict[str, tuple[str | int, ...]] = {
    "hermes": (BEGIN, '\n{"name": "say", "arguments": {"text": "<b>"}}\n', END),
    "qwen3_coder": (BEGIN, "\n<function=say>\n<parameter=text>\n<b>\n</parameter>\n</function>\n", END),
    "glm45": (BEGIN, "say\n", KEY, "text", KEY_END, "\n", VALUE, "<b>", VALUE_END, "\n", END),
    "gemma4": (BEGIN, "call:say{text:", SEPARATOR, "<b>", SEPARATOR, "}", END),
    "kimi_k2": (SECTION, BEGIN, "functions.say:0", SEPARATOR, '{"text": "<b>"}', END, SECTION_END),
}


@pytest.mark.parametrize("form", FORMS)
def test_call_is_required_or_optional(form: str) -> None:
    must, may = grammar(form, {"say": SAY}), grammar(form, {"say": SAY}, must_call=False)
    call = CALLS[form]
    assert allows(must, *call)
    assert allows(may, *call)
    assert allows(may, "A text\n", *call)
    assert allows(may, "A text")
    assert not allows(must, "A text")
    assert not allows(must, "A text\n", *call)
    assert not allows(must)
    wrong = [piece.replace("say", "shout") if isinstance(piece, str) else piece for piece in call]
    assert not allows(may, *wrong)


CARD = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def with_content(form: str, schema: Any, strict: bool = True) -> Outcome:
    """Return what the gateway's trial makes of calls of `say`, or JSON by *schema*."""
    content = ContentConstraint(json.dumps(schema), "response_format", strict)
    calls = CallConstraint(
        [FunctionConstraint("say", SAY, "tools.say")], FORMS[form], must_call=False, many=True, content=content
    )
    return try_constraint(Constraint("tool_calls", msgspec.json.encode(calls).decode(), "tools"))


@pytest.mark.parametrize("form", FORMS)
def test_either_calls_or_json(form: str) -> None:  # F13
    held = with_content(form, {"$ref": "#/$defs/card", "$defs": {"card": CARD}}).grammar
    assert held is not None
    assert allows(held, *CALLS[form])
    assert allows(held, '{"n": 3}')
    for wrong in (("A text",), ('{"n": "3"}',), ('{"n": 3}', *CALLS[form]), (*CALLS[form], '{"n": 3}'), ()):
        assert not allows(held, *wrong)


def test_errors_and_warnings_name_the_schema_of_the_content() -> None:
    schema = {"type": "array", "uniqueItems": True}
    refused, dropped = with_content("hermes", schema), with_content("hermes", schema, strict=False)
    assert (refused.code, refused.param) == ("unsupported_parameter", "response_format.uniqueItems")
    assert dropped.dropped == ["response_format.uniqueItems"]
    assert dropped.grammar is not None
    assert allows(dropped.grammar, "[1, 1]")


def test_one_call_at_most() -> None:
    call = CALLS["hermes"]
    assert allows(grammar("hermes", {"say": SAY}), *call, "\n", *call)
    assert not allows(grammar("hermes", {"say": SAY}, many=False), *call, "\n", *call)


def test_constraints_on_plain_text_are_refused() -> None:
    """Qwen3-Coder's calls have texts without quotes, so no pattern holds them."""
    schema = {**SAY, "properties": {"text": {"type": "string", "maxLength": 3}}}
    assert allows(grammar("qwen3_coder", {"say": schema}), *CALLS["qwen3_coder"])
    with pytest.raises(UnsupportedParameter, match=r"tools\.say\.properties\.text\.maxLength"):
        grammar("qwen3_coder", {"say": schema}, strict=True)
    assert allows(grammar("hermes", {"say": schema}, strict=True), *CALLS["hermes"])
    with pytest.raises(InvalidValue, match="line break"):
        grammar("qwen3_coder", {"say": {"type": "object", "properties": {"a>b": {"type": "string"}}}})


def test_warning_about_a_parameter_is_safe_in_a_header() -> None:
    schema = {"type": "object", "properties": {"\u00e4\tb": {"type": "string", "maxLength": 3}}}
    calls = CallConstraint(
        [FunctionConstraint("say", schema, "tools.say")], FORMS["qwen3_coder"], must_call=True, many=False
    )
    outcome = try_constraint(Constraint("tool_calls", msgspec.json.encode(calls).decode(), "tools"))
    assert outcome.dropped == ["tools.say.properties.??b.maxLength"]


def test_errors_name_the_schema() -> None:
    with pytest.raises(UnsupportedParameter, match=r"tools\.say\.not"):
        grammar("hermes", {"say": {**SAY, "not": {}}}, strict=True)
