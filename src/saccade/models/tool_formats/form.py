"""Defines the parts of a tool-call format, and writes llguidance's Lark grammars for answers that call tools.

Calls have the form in which the releases' chat templates write them in later turns. A call's tag is one token,
`<[id]>`, not text, so nothing else in an answer can be mistaken for it.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from saccade.errors import UnsupportedParameter
from saccade.grammars.compiler import WHITE_SPACE
from saccade.grammars.json_schema import OPTIONS, SupportedSchema
from saccade.grammars.schema_places import Schema, excerpt
from saccade.models.tool_formats.call_pieces import CallPieces
from saccade.models.tool_formats.call_scanner import CallScanner

Declared = Mapping[str, Mapping[str, Any]]
"""The request's functions by name."""


class ToolTags(NamedTuple):
    """The tags of a form. A section may enclose the calls; *separator* divides a call's name from its arguments.

    An argument's name and its value may each stand between two tags.
    """

    begin: str
    end: str
    section_begin: str | None = None
    section_end: str | None = None
    separator: str | None = None
    key_begin: str | None = None
    key_end: str | None = None
    value_begin: str | None = None
    value_end: str | None = None


class ToolCallTokens(msgspec.Struct, frozen=True):
    """A form of calls, and the ids of its tags in a vocabulary; None for a tag that the form does not have."""

    format: str
    begin_id: int
    end_id: int
    section_begin_id: int | None = None
    section_end_id: int | None = None
    separator_id: int | None = None
    key_begin_id: int | None = None
    key_end_id: int | None = None
    value_begin_id: int | None = None
    value_end_id: int | None = None

    def renumbered(self, first_id: int) -> "ToolCallTokens":
        """Return the same tags with ids from *first_id* on, for a vocabulary without a model."""
        optional = msgspec.structs.astuple(self)[3:]
        others = (None if tag is None else first_id + place for place, tag in enumerate(optional, 2))
        return ToolCallTokens(self.format, first_id, first_id + 1, *others)


class FunctionConstraint(msgspec.Struct, frozen=True):
    """A function whose arguments match *parameters*, an object schema found at *place* in the request."""

    name: str
    parameters: Schema
    place: str
    strict: bool = False


class ContentConstraint(msgspec.Struct, frozen=True):
    """An answer without calls: JSON that matches the schema in *text*, found at *place* in the request."""

    text: str
    place: str
    strict: bool = False


class CallConstraint(msgspec.Struct, frozen=True):
    """Answers that call one of *functions* once or, with *many*, call them several times.

    Without *must_call*, an answer may be *content* instead. If that is None, it may be any text, with or without calls
    after it.
    """

    functions: list[FunctionConstraint]
    tokens: ToolCallTokens
    must_call: bool
    many: bool
    content: ContentConstraint | None = None


@dataclass(frozen=True)
class ParsedCall:
    """A call of the tool *name*; *arguments* are a JSON object as text. *id* is the model's own, if it writes one."""

    name: str
    arguments: str
    id: str | None = None


def _as_it_is(_: FunctionConstraint, enforced: SupportedSchema) -> SupportedSchema:
    return enforced


def _no_rules(index: int, function: FunctionConstraint, tokens: ToolCallTokens) -> Iterator[str]:
    raise NotImplementedError


@dataclass(frozen=True)
class ToolFormat:
    """A form of tool calls.

    *scanner* follows a call's text up to its end, given the names of the declared functions. *parse* reads the call
    from that text, in parts if it has separators, and returns None if it calls no declared function. *pieces* reads a
    call in the grammar's exact form while it is written. *opening* is the text that begins a call without its tag, if
    the form has such calls.

    *rules* yields the grammar rules for a call of function *index*, starting with `call_INDEX`. *limits* refuses or
    drops the keywords of a function's schema that the form cannot enforce. *variables* computes template variables from
    the tools, if the releases' own code does. *between* is the text between calls outside of a section. *markup* has
    the ids of tags that consist of several tokens. A form that *numbers_calls* uses NAME_NUMBER as a call's id; NUMBER
    counts the calls of the whole chat. A form with a *structural_tag*, for other projects' engines, has no *rules*; its
    *limits* also apply to JSON answers.
    """

    tags: ToolTags
    parse: Callable[[Sequence[str], Declared], ParsedCall | None]
    scanner: Callable[[Collection[str]], CallScanner]
    pieces: Callable[[Declared], CallPieces]
    rules: Callable[[int, FunctionConstraint, ToolCallTokens], Iterator[str]] = _no_rules
    limits: Callable[[FunctionConstraint, SupportedSchema], SupportedSchema] = _as_it_is
    variables: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]] | None = None
    between: str = "\n"
    markup: ToolCallTokens | None = None
    opening: str = ""
    numbers_calls: bool = False
    structural_tag: Callable[[CallConstraint], str] | None = None

    def grammar(self, calls: CallConstraint) -> str:
        """Return the Lark grammar of *calls*, whose schemas can be enforced."""
        tokens = calls.tokens
        lines = [f"call: {' | '.join(f'call_{index}' for index in range(len(calls.functions)))}"]
        for index, function in enumerate(calls.functions):
            lines.extend(self.rules(index, function, tokens))
        if tokens.section_begin_id is not None:
            several = f"{tag(tokens.section_begin_id)} call{'+' if calls.many else ''} {tag(tokens.section_end_id)}"
        else:
            several = f"call ({quoted(self.between)} call)*" if calls.many else "call"
        if calls.content is not None:
            start = [f"start: {several} | content", f"content: {json_rule(json.loads(calls.content.text))}"]
        elif calls.must_call:
            start = [f"start: {several}"]
        else:
            start = [f"start: free | free {several}", "free: /(?s:.*)/"]
        return "\n".join((*start, *lines))


def parts_of(place: str, schema: Any) -> Iterator[tuple[str, Schema]]:
    """Yield *schema* and the schemas in it, with their places."""
    if not isinstance(schema, dict):
        return
    yield place, schema
    for keyword in ("properties", "$defs", "definitions"):
        named = schema.get(keyword)
        for name, part in named.items() if isinstance(named, dict) else ():
            yield from parts_of(f"{place}.{keyword}.{excerpt(name)}", part)
    for keyword in ("items", "additionalProperties"):
        yield from parts_of(f"{place}.{keyword}", schema.get(keyword))
    for keyword in ("anyOf", "oneOf"):
        listed = schema.get(keyword)
        for index, part in enumerate(listed if isinstance(listed, list) else ()):
            yield from parts_of(f"{place}.{keyword}[{index}]", part)


def without(keywords: Sequence[str], function: FunctionConstraint, enforced: SupportedSchema) -> SupportedSchema:
    """Drop *keywords*, which a form cannot enforce. Raises UnsupportedParameter if *function* is strict."""
    for place, schema in parts_of(function.place, enforced.schema):
        for keyword in keywords:
            if keyword not in schema:
                continue
            if function.strict:
                raise UnsupportedParameter(
                    f"`{place}.{keyword}` cannot be enforced for this model; leave it out, or do not set `strict`.",
                    f"{place}.{keyword}",
                )
            del schema[keyword]
            if keyword == "patternProperties":
                schema.pop("additionalProperties", None)  # It applies to what no pattern matches.
            enforced.dropped.append(f"{place}.{keyword}")
    return enforced


def with_sorted_keys(value: Any) -> Any:
    """Return *value* with the keys of all objects sorted, as in some releases' code."""
    match value:
        case dict():
            return {key: with_sorted_keys(value[key]) for key in sorted(value)}
        case list():
            return [with_sorted_keys(item) for item in value]
    return value


def json_rule(schema: Schema) -> str:
    """Return the right side of a grammar rule for JSON that matches *schema*."""
    return f"%json {json.dumps({**schema, OPTIONS: {'whitespace_pattern': WHITE_SPACE}})}"


def quoted(text: str) -> str:
    """Return *text* as a terminal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def tag(token_id: int | None) -> str:
    """Return a token as a terminal of a grammar."""
    return f"<[{token_id}]>"


def json_of(text: str) -> Any:
    """Return the JSON value in *text*, or None if it is not valid JSON."""
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def to_json(arguments: Mapping[str, Any]) -> str:
    """Return *arguments* as chat templates write them in later turns."""
    return json.dumps(arguments, ensure_ascii=False)
