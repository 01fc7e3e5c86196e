"""The common code for calls whose text values have no quotes, whatever tags enclose them."""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.grammars.json_schema import SupportedSchema
from saccade.grammars.property_types import property_types
from saccade.grammars.schema_places import Schema, excerpt
from saccade.models.tool_formats import form

TEXT_KEYWORDS: Final = ("pattern", "format", "minLength", "maxLength")
"""Keywords that cannot be enforced for a parameter that a model writes as bare text."""

TAG_FIELDS: Final = frozenset(form.ToolCallTokens.__struct_fields__[1:])


Span = tuple[str, int, int]
"""A parameter's name, and its value's start and end."""


class BareShape(NamedTuple):
    """A call's pieces: *opening* and *closing* enclose all parameters, *parameter* and *end_parameter* each value.

    A piece is text, in which `{}` stands for the name, or a field of ToolCallTokens, which stands for that tag.
    """

    opening: tuple[str, ...]
    parameter: tuple[str, ...]
    end_parameter: tuple[str, ...]
    closing: tuple[str, ...] = ()


class ValueTags(NamedTuple):
    """The tags around a value.

    *opening* matches the text before it, with the parameter's name as a group, and *end* is the tag after it. *damaged*
    matches what may stand before a value instead of *opening*. A whole call in a value runs from *example_begin* to
    *example_end*.
    """

    opening: re.Pattern[str]
    end: str
    example_begin: re.Pattern[str]
    example_end: str
    damaged: re.Pattern[str] | None = None

    def begin_value(self, text: str, place: int) -> re.Match[str] | None:
        """Return the match of the text that opens a value at *place* in *text*; None if there is none."""
        opening = self.opening.match(text, place)
        return opening if opening is not None or self.damaged is None else self.damaged.match(text, place)


def values_in(text: str, tags: ValueTags, schema: Schema) -> dict[str, str] | None:
    """Return the values in *text* by name, or None if there is other text too.

    A value ends at the first end tag that is followed by another parameter or by nothing. If its end tag is missing, it
    ends before the next parameter of *schema*, or with the text. Tags in a whole call within a value do not count.
    """
    marked = _without_examples(text.rstrip(), tags)
    spans = list[Span]()
    place = _skip_space(marked, 0)
    while place < len(marked):
        begin = tags.begin_value(marked, place)
        if begin is None:
            return None
        first = border = marked.find(tags.end, begin.end())
        while border >= 0:
            place = _skip_space(marked, border + len(tags.end))
            if place == len(marked) or tags.begin_value(marked, place):
                break
            border = marked.find(tags.end, border + 1)
        if border < 0:
            if first >= 0:
                return None
            border = place = len(marked)
        spans.append((begin[1], begin.end(), border))
    return {name: text[start:end] for name, start, end in _divided(marked, spans, tags, schema)}


def _divided(text: str, spans: Sequence[Span], tags: ValueTags, schema: Schema) -> Iterator[Span]:
    """Yield *spans*, each cut before a declared parameter that begins in it and has no other value.

    A value that includes another parameter's end tag keeps it whole, as an example. If values have lines of their own,
    so do the tags.
    """
    missing = _properties(schema).keys() - {name for name, _, _ in spans}
    for name, start, end in spans:
        has_lines = text.startswith("\n", start)
        for begin in tags.opening.finditer(text, start, end):
            is_in_line = has_lines and text[start : begin.start()].rpartition("\n")[2].strip()
            if begin[1] in missing and not is_in_line and tags.end not in text[begin.start() : end]:
                missing -= {begin[1]}
                yield name, start, begin.start() - text.endswith("\n", start, begin.start())
                name, start = begin[1], begin.end()
        yield name, start, end


def _without_examples(text: str, tags: ValueTags) -> str:
    """Return *text* with calls within values replaced by as many other characters."""
    parts, done, place = list[str](), 0, 0
    while begin := tags.example_begin.search(text, place):
        place, depth = begin.end(), 1
        while depth:
            end, inner = text.find(tags.example_end, place), tags.example_begin.search(text, place)
            if end < 0:
                return "".join((*parts, text[done:]))
            is_inner = inner is not None and inner.start() < end
            place = inner.end() if inner is not None and is_inner else end + len(tags.example_end)
            depth += 1 if is_inner else -1
        parts += (text[done : begin.start()], "x" * (place - begin.start()))
        done = place
    return "".join((*parts, text[done:]))


def _skip_space(text: str, place: int) -> int:
    """Return the place after the white space at *place*."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def limits(function: form.FunctionConstraint, enforced: SupportedSchema) -> SupportedSchema:
    """Refuse or drop keywords that bare text cannot enforce. Raises InvalidValue and UnsupportedParameter."""
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


def rules(
    shape: BareShape, index: int, function: form.FunctionConstraint, tokens: form.ToolCallTokens
) -> Iterator[str]:
    """Yield the grammar rules for a call of function *index* in *shape*, starting with `call_INDEX`."""
    schema = function.parameters
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    names = [f"parameter_{index}_{number}" for number in range(len(_properties(schema)))]
    ordered = " ".join(
        rule if name in (required or []) else f"{rule}?" for rule, name in zip(names, _properties(schema), strict=True)
    )
    opening = _terminals(shape.opening, function.name, tokens)
    closing = _terminals(shape.closing, "", tokens)
    yield f"call_{index}: {form.tag(tokens.begin_id)} {opening} {ordered} {closing} {form.tag(tokens.end_id)}"
    definitions: Schema = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    after = _terminals(shape.end_parameter, "", tokens)
    for rule, (name, declared) in zip(names, _properties(schema).items(), strict=True):
        before = _terminals(shape.parameter, name, tokens)
        if not _is_text(name, schema):
            yield f"{rule}: {before} {rule}_value {after}"
            yield f"{rule}_value: {form.json_rule({**definitions, **declared})}"
        elif texts := _texts(declared):
            yield f"{rule}: {before} ({' | '.join(map(form.quoted, texts))}) {after}"
        elif shape.end_parameter[0] in TAG_FIELDS:
            yield f"{rule}: {before} {rule}_value {after}"
            yield f"{rule}_value: /(?s:.*)/"
        else:
            yield f"{rule}: {before} {rule}_value"
            yield f"{rule}_value[suffix={after}]: /(?s:.*)/"


def _terminals(pieces: tuple[str, ...], name: str, tokens: form.ToolCallTokens) -> str:
    """Return *pieces* as terminals of a grammar."""
    return " ".join(
        form.tag(getattr(tokens, piece)) if piece in TAG_FIELDS else form.quoted(piece.format(name)) for piece in pieces
    )


def _properties(schema: Schema) -> dict[str, Schema]:
    properties = schema.get("properties")
    items = properties.items() if isinstance(properties, dict) else ()
    return {name: declared if isinstance(declared, dict) else {} for name, declared in items}


def _is_text(name: str, schema: Schema) -> bool:
    """Return whether the property *name* of *schema* is read as bare text."""
    return not property_types(name, schema) - {"string"}


def _texts(declared: Schema) -> list[str]:
    """Return the only texts that *declared* allows, or [] if it does not list any."""
    allowed = [declared["const"]] if "const" in declared else declared.get("enum")
    return [text for text in allowed if isinstance(text, str)] if isinstance(allowed, list) else []
