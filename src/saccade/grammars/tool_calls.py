"""Write the grammar of answers that call tools, in llguidance's form of Lark.

The calls have the form in which the releases' chat templates write them in later turns. A tag of a call is one token,
`<[id]>`, and no text: nothing else in an answer can be taken for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.grammars.compiler import WHITE_SPACE
from saccade.grammars.json_schema import OPTIONS, Schema, SupportedSchema, excerpt
from saccade.grammars.property_types import property_types

TEXT_KEYWORDS: Final = ("pattern", "format", "minLength", "maxLength")
"""Keywords that cannot be enforced for a parameter that a model writes as bare text."""


class ToolCallTokens(msgspec.Struct, frozen=True):
    """A form of calls, and the ids of its tags in a vocabulary; None for a tag that the form does not have."""

    format: Literal["hermes", "qwen3_coder", "kimi_k2"]
    begin_id: int
    end_id: int
    section_begin_id: int | None = None
    section_end_id: int | None = None
    separator_id: int | None = None

    def renumbered(self, first_id: int) -> "ToolCallTokens":
        """Return the same tags with ids from *first_id* on, for a vocabulary without a model."""
        optional = (self.section_begin_id, self.section_end_id, self.separator_id)
        others = (None if tag is None else first_id + place for place, tag in enumerate(optional, 2))
        return ToolCallTokens(self.format, first_id, first_id + 1, *others)


class FunctionConstraint(msgspec.Struct, frozen=True):
    """A function whose arguments match *parameters*, a schema of the type object, found at *place* of the request."""

    name: str
    parameters: Schema
    place: str
    strict: bool = False


class ContentConstraint(msgspec.Struct, frozen=True):
    """An answer without calls: JSON that matches the schema in *text*, found at *place* of the request."""

    text: str
    place: str
    strict: bool = False


class CallConstraint(msgspec.Struct, frozen=True):
    """Answers that call *functions* once, or more often with *many*.

    Without *must_call* an answer may be *content* instead; if that is None, any text, also before the calls.
    """

    functions: list[FunctionConstraint]
    tokens: ToolCallTokens
    must_call: bool
    many: bool
    content: ContentConstraint | None = None


def read_parameters(
    function: FunctionConstraint, tokens: ToolCallTokens, read: Callable[[str], SupportedSchema]
) -> SupportedSchema:
    """Return the schema of the arguments of *function*, all keywords of which *read* and bare text can enforce.

    Raises InvalidValue and UnsupportedParameter, which name the keyword's place.
    """
    enforced = read(json.dumps(function.parameters))
    if tokens.format != "qwen3_coder":
        return enforced
    for name, schema in _properties(enforced.schema).items():
        place = f"{function.place}.properties.{excerpt(name)}"
        if not name or set(name) & set("<>\n\r"):
            raise InvalidValue(f"`{function.place}.properties`: a parameter's name has no <, > or line break.", place)
        refused = [keyword for keyword in TEXT_KEYWORDS if _is_text(name, enforced.schema) and keyword in schema]
        if refused and function.strict:
            raise UnsupportedParameter(
                f"`{place}.{refused[0]}` cannot be enforced, because this model writes texts without quotes; leave it "
                "out, or do not set `strict`.",
                f"{place}.{refused[0]}",
            )
        enforced.dropped.extend(f"{place}.{keyword}" for keyword in refused)
    return enforced


def write_grammar(calls: CallConstraint) -> str:
    """Return the Lark grammar of *calls*, whose schemas can be enforced."""
    tokens = calls.tokens
    lines = [f"call: {' | '.join(f'call_{index}' for index in range(len(calls.functions)))}"]
    for index, function in enumerate(calls.functions):
        lines.extend(_WRITERS[tokens.format](index, function, tokens))
    if tokens.format == "kimi_k2":
        several = f"{_tag(tokens.section_begin_id)} call{'+' if calls.many else ''} {_tag(tokens.section_end_id)}"
    else:
        several = 'call ("\\n" call)*' if calls.many else "call"
    if calls.content is not None:
        lines = [f"start: {several} | content", f"content: {_json(json.loads(calls.content.text))}", *lines]
    elif calls.must_call:
        lines = [f"start: {several}", *lines]
    else:
        lines = [f"start: free | free {several}", "free: /(?s:.*)/", *lines]
    return "\n".join(lines)


def _hermes(index: int, function: FunctionConstraint, tokens: ToolCallTokens) -> Iterator[str]:
    opening, closing = _text(f'\n{{"name": {json.dumps(function.name)}, "arguments": '), _text("}\n")
    yield f"call_{index}: {_tag(tokens.begin_id)} {opening} arguments_{index} {closing} {_tag(tokens.end_id)}"
    yield f"arguments_{index}: {_json(function.parameters)}"


def _kimi_k2(index: int, function: FunctionConstraint, tokens: ToolCallTokens) -> Iterator[str]:
    name = f"{_text(f'functions.{function.name}:')} /[0-9]{{1,3}}/"
    ends = _tag(tokens.separator_id), _tag(tokens.end_id)
    yield f"call_{index}: {_tag(tokens.begin_id)} {name} {ends[0]} arguments_{index} {ends[1]}"
    yield f"arguments_{index}: {_json(function.parameters)}"


def _qwen3_coder(index: int, function: FunctionConstraint, tokens: ToolCallTokens) -> Iterator[str]:
    schema = function.parameters
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    names = [f"parameter_{index}_{number}" for number in range(len(_properties(schema)))]
    rules = " ".join(
        rule if name in (required or []) else f"{rule}?" for rule, name in zip(names, _properties(schema), strict=True)
    )
    opening, closing = _text(f"\n<function={function.name}>\n"), _text("</function>\n")
    yield f"call_{index}: {_tag(tokens.begin_id)} {opening} {rules} {closing} {_tag(tokens.end_id)}"
    definitions: Schema = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for rule, (name, declared) in zip(names, _properties(schema).items(), strict=True):
        opening, closing = _text(f"<parameter={name}>\n"), "\n</parameter>\n"
        if not _is_text(name, schema):
            yield f"{rule}: {opening} {rule}_value {_text(closing)}"
            yield f"{rule}_value: {_json({**definitions, **declared})}"
        elif texts := _texts(declared):
            yield f"{rule}: {opening} ({' | '.join(map(_text, texts))}) {_text(closing)}"
        else:
            yield f"{rule}: {opening} {rule}_value"
            yield f"{rule}_value[suffix={_text(closing)}]: /(?s:.*)/"


_WRITERS: Final[Mapping[str, Callable[[int, FunctionConstraint, ToolCallTokens], Iterator[str]]]] = {
    "hermes": _hermes,
    "kimi_k2": _kimi_k2,
    "qwen3_coder": _qwen3_coder,
}


def _properties(schema: Schema) -> dict[str, Schema]:
    properties = schema.get("properties")
    items = properties.items() if isinstance(properties, dict) else ()
    return {name: declared if isinstance(declared, dict) else {} for name, declared in items}


def _is_text(name: str, schema: Schema) -> bool:
    """Return whether the property *name* of *schema* is read as bare text."""
    return not property_types(name, schema) - {"string"}


def _texts(declared: Schema) -> list[str]:
    """Return the only texts that *declared* allows; none if it allows others."""
    allowed = [declared["const"]] if "const" in declared else declared.get("enum")
    return [text for text in allowed if isinstance(text, str)] if isinstance(allowed, list) else []


def _json(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, OPTIONS: {'whitespace_pattern': WHITE_SPACE}})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _tag(token_id: int | None) -> str:
    return f"<[{token_id}]>"
