"""The constraint that a request puts on its answer: a schema, a grammar, or tool calls.

A schema comes from OpenAI's `response_format`, from vLLM's `structured_outputs` or `guided_*`, or from the
corresponding fields of llama.cpp, TGI and SGLang. Calls come from `tool_choice` and `strict` functions.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.gateway.chat_request import ChatRequest, JsonSchemaFormat
from saccade.gateway.field_schemas import FORMAT_TYPES, GrammarText
from saccade.gateway.json_body import decode, is_given
from saccade.gateway.prompt.tools import read_choice
from saccade.models.tool_formats import FORMATS
from saccade.models.tool_formats.form import CallConstraint, ContentConstraint, FunctionConstraint, ToolCallTokens
from saccade.tokenization.messages import Tool

FORM = "response_format"
SPELLING = 'send {"type": "json_schema", "json_schema": {"name": "answer", "schema": {...}}}'
TRUE = Raw(b"true")
ANY_OBJECT = '{"type": "object"}'
Kind = Literal["json_schema", "regex", "grammar", "tool_calls"]


_GRAMMAR = msgspec.json.Decoder(GrammarText)
_OBJECT = msgspec.json.Decoder(dict[str, Raw])


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""The parameters of a function without `parameters`, as in OpenAI's API."""


@dataclass(frozen=True)
class Constraint:
    """A client's grammar, from the field *param*. No keyword of a *strict* schema is dropped.

    For "tool_calls", the text is a CallConstraint as JSON.
    """

    kind: Kind
    text: str
    param: str
    strict: bool = False


def read_constraint(request: ChatRequest) -> Constraint | None:
    """Return the constraint on the answer, or None if there is none.

    Raises InvalidValue for two constraints or an incomplete one, and UnsupportedParameter for vLLM's fields that are
    not served.
    """
    constraints = [*_response_format(request), *_structured_outputs(request), *_guided(request), *_others(request)]
    if len(constraints) > 1:
        first, second = constraints[0].param.split(".")[0], constraints[1].param
        raise InvalidValue(f"`{second}` and `{first}` cannot both constrain the answer; send one of them.", second)
    return constraints[0] if constraints else None


def without_constraint(request: ChatRequest) -> ChatRequest:
    """Return *request* without the fields that read_constraint() reads, which keep the whole body alive."""
    return msgspec.structs.replace(
        request,
        response_format=None,
        structured_outputs=None,
        guided_json=UNSET,
        guided_regex=None,
        guided_choice=None,
        guided_grammar=None,
        json_schema=UNSET,
        regex=None,
        ebnf=None,
        grammar=None,
    )


def _response_format(request: ChatRequest) -> Iterator[Constraint]:
    form = request.response_format
    if form is None:
        return
    if form.type not in FORMAT_TYPES:
        raise InvalidValue(
            f"`response_format.type` must be {' or '.join(FORMAT_TYPES[:3])}; {SPELLING}.", f"{FORM}.type"
        )
    if form.type == "regex":
        if form.value is UNSET:
            raise InvalidValue(
                "`response_format.value` is missing; the regular expression stands there.", f"{FORM}.value"
            )
        yield Constraint("regex", decode(form.value, _GRAMMAR, f"{FORM}.value"), f"{FORM}.value")
        return
    nested = form.json_schema or JsonSchemaFormat()
    places = ("json_schema.schema", nested.schema, nested.strict), ("schema", form.schema, form.strict)
    schemas = [
        _schema(raw, f"{FORM}.{name}", bool(strict))
        for name, raw, strict in (*places, ("value", form.value, form.strict))
        if is_given(raw)
    ]
    if form.type == "text" and schemas:
        raise InvalidValue(f"`{schemas[0].param}` has no effect on a text; {SPELLING}.", schemas[0].param)
    if form.type in ("json_schema", "json") and not schemas:
        param = f"{FORM}.json_schema" + ("" if form.json_schema is None else ".schema")
        raise InvalidValue(f"`{param}` is missing; {SPELLING}.", param)
    if form.type == "json_object" and not schemas:
        yield Constraint("json_schema", ANY_OBJECT, FORM)
    yield from schemas


def _structured_outputs(request: ChatRequest) -> Iterator[Constraint]:
    outputs = request.structured_outputs
    if outputs is None:
        return
    for name in ("structural_tag", "whitespace_pattern"):
        if is_given(getattr(outputs, name)):
            param = f"structured_outputs.{name}"
            raise UnsupportedParameter(f"`{param}` is not served; leave it out.", param)
    if outputs.json_object:
        yield Constraint("json_schema", ANY_OBJECT, "structured_outputs.json_object")
    yield from _vllm("structured_outputs.", outputs.json, outputs.regex, outputs.choice, outputs.grammar)


def _guided(request: ChatRequest) -> Iterator[Constraint]:
    return _vllm("guided_", request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)


def _vllm(
    prefix: str, schema: Raw | UnsetType, regex: str | None, choice: list[str] | None, grammar: str | None
) -> Iterator[Constraint]:
    if is_given(schema):
        yield Constraint("json_schema", _text(schema), f"{prefix}json")
    if regex is not None:
        yield Constraint("regex", regex, f"{prefix}regex")
    if choice is not None:
        yield Constraint("regex", "|".join(map(re.escape, dict.fromkeys(choice))), f"{prefix}choice")
    if grammar is not None:
        yield Constraint("grammar", grammar, f"{prefix}grammar")


def _others(request: ChatRequest) -> Iterator[Constraint]:
    if is_given(request.json_schema):
        yield _schema(request.json_schema, "json_schema")
    if request.regex:
        yield Constraint("regex", request.regex, "regex")
    for name, grammar in (("ebnf", request.ebnf), ("grammar", request.grammar)):
        if grammar:
            yield Constraint("grammar", grammar, name)


def _schema(schema: Raw | UnsetType, param: str, strict: bool = False) -> Constraint:
    """Return the constraint for *schema*, which may be wrapped in OpenAI's object with a name."""
    text = _text(schema)
    if '"schema"' in text and text.lstrip().startswith("{"):
        inner = decode(text.encode(), _OBJECT, param)
        if "schema" in inner and inner.keys() <= {*JsonSchemaFormat.__struct_fields__, "type"}:
            return Constraint("json_schema", _text(inner["schema"]), f"{param}.schema", inner.get("strict") == TRUE)
    return Constraint("json_schema", text, param, strict)


def _text(schema: Raw | UnsetType) -> str:
    """Return *schema* as JSON text; vLLM's clients may send it as a JSON string."""
    text = b"" if schema is UNSET else bytes(schema)
    return str(json.loads(text)) if text.startswith(b'"') else text.decode()


def with_calls(
    constraint: Constraint | None, request: ChatRequest, tools: Sequence[Tool], tokens: ToolCallTokens | None
) -> Constraint | None:
    """Return the constraint on the answer: *constraint*, calls of *tools*, a choice of the two, or None.

    Without *tools*, a JSON constraint stays unchanged, unless answers in the form of *tokens* enclose the JSON in tags.
    Raises InvalidValue if calls would apply together with a *constraint* that is not JSON.
    """
    choice = read_choice(request)
    is_strict = any(tool["function"].get("strict") for tool in tools)
    is_json = constraint is not None and constraint.kind == "json_schema"
    if tokens is None or not (choice.must_call or is_strict or is_json):
        return constraint
    if not tools and FORMATS[tokens.format].structural_tag is None:
        return constraint
    param = "tool_choice" if choice.must_call else "tools" if tools or constraint is None else constraint.param
    if constraint is not None and not is_json:
        other = constraint.param.split(".")[0]
        raise InvalidValue(f"`{param}` and `{other}` cannot both constrain the answer; send one of them.", param)
    # An answer that must call has no content to constrain.
    content = None
    if constraint is not None and not choice.must_call:
        content = ContentConstraint(constraint.text, constraint.param, constraint.strict)
    functions = [
        _function_constraint(tool, f"tools[{position}].function.parameters")
        for position, tool in enumerate(tools)
        if choice.name in (None, tool["function"]["name"])
    ]
    calls = CallConstraint(
        functions,
        tokens,
        must_call=choice.must_call,
        many=request.parallel_tool_calls is not False and choice.name is None,
        content=content,
    )
    return Constraint("tool_calls", msgspec.json.encode(calls).decode(), param)


def _function_constraint(tool: Tool, place: str) -> FunctionConstraint:
    function = tool["function"]
    parameters = function.get("parameters")
    schema = NO_PARAMETERS if parameters is None else {"type": "object", **parameters}
    return FunctionConstraint(function["name"], schema, place, bool(function.get("strict")))
