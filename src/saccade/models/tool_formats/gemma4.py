"""Gemma 4's calls: `call:NAME{key:value,...}` between tags, with bare keys, and strings between quote tokens.

Nothing is escaped: a string ends at the next quote, which is a token and not text. The chat template writes keys in
alphabetical order, and so does the grammar.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from saccade.errors import InvalidValue
from saccade.grammars.json_schema import SupportedSchema
from saccade.grammars.property_types import referred, schema_below, schema_types
from saccade.grammars.schema_places import Schema
from saccade.models.tool_formats import form
from saccade.models.tool_formats.bare_keys import NoArguments, bare_value, read_arguments
from saccade.models.tool_formats.call_pieces import CallPieces, Mark
from saccade.models.tool_formats.call_scanner import MAX_HEAD, CallScanner, Nesting
from saccade.models.tool_formats.json_pieces import MARKS as MARKS_IN_JSON
from saccade.models.tool_formats.json_pieces import JsonOrder, escaped, quoted

TAGS = form.ToolTags("<|tool_call>", "<tool_call|>", separator='<|"|>')
OTHERS: Final = re.compile(r"[^{}\[\]]*")
"""All that is between braces and brackets."""

PREFIX: Final = "call:"
UNENFORCED: Final = (
    "pattern",
    "format",
    "allOf",
    "patternProperties",
    "prefixItems",
    "multipleOf",
    "minProperties",
    "maxProperties",
)
"""Keywords that the grammar does not enforce."""

MARKS: Final = frozenset('"{}[],:')
"""Characters that end a key, which has no quotes."""

LEXEMES: Final = re.compile(r"[{}\[\],:]|[^{}\[\],:]+")
"""A mark, or the text between marks."""

EVERY_TYPE: Final = ["string", "number", "boolean", "null", "array", "object"]


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse `call:NAME{...}`. Every second part in *parts* is a string's text."""
    start, brace, rest = parts[0].partition("{")
    head = "".join(start.split())
    name = next((name for name in functions if head in _heads(name)), None)
    if not brace or name is None or len(parts) % 2 == 0:
        return None
    try:
        arguments = read_arguments([brace + rest, *parts[1:]], functions[name].get("parameters") or {})
    except NoArguments:
        return None
    return form.ParsedCall(name, form.to_json(arguments))


def _heads(name: str) -> tuple[str, ...]:
    """Return what may be before the brace of a call of the function *name*."""
    return f"{PREFIX}{name}", f":{name}", name


class Scanner(CallScanner):
    """Follows a call's name and braces. A string ends at the next quote."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._pieces: list[list[str]] = [[]]
        self._nesting = Nesting(OTHERS)
        self._has_head = False

    @property
    def parts(self) -> list[str]:
        return ["".join(pieces) for pieces in self._pieces]

    @property
    def in_value(self) -> bool:
        return len(self._pieces) % 2 == 0

    @property
    def is_whole(self) -> bool:
        return self._nesting.is_whole and not self.in_value

    def add_text(self, text: str) -> None:
        self._pieces[-1].append(text)
        if self.in_value:
            return
        if not self._has_head:
            head = self.parts[0]
            start, brace, rest = head.partition("{")
            self._has_head, text = bool(brace), brace + rest
            self.is_broken = len(head) > MAX_HEAD or not self._is_head(start, bool(brace))
        if self._has_head:
            self._nesting.push_text(text)
            self.is_broken |= self._nesting.is_broken

    def separate(self, text: str) -> None:
        self._pieces.append([])
        self.is_broken = not self._has_head or self._nesting.is_whole

    def _is_head(self, start: str, is_complete: bool) -> bool:
        """Return whether *start* is the text before a call's brace, or the beginning of it."""
        text = "".join(start.split())
        heads = (head for name in self._names for head in _heads(name))
        return any(text == head if is_complete else head.startswith(text) for head in heads)


class Pieces(CallPieces):
    """Reads a call's name and braces. Keys and bare values wait for the mark after them."""

    def __init__(self, functions: form.Declared) -> None:
        super().__init__(functions)
        self._bare = ""
        self._in_string = False
        self._next: Any = None
        """The schema of the next value."""

        self._order = JsonOrder()
        self._containers: list[tuple[str, Any]] = []
        """The open braces and brackets, with their schemas."""

    @property
    def is_over(self) -> bool:
        return bool(self.name) and not self._containers

    @property
    def unread(self) -> str:
        return self._bare

    def text(self, text: str) -> str:
        if self._in_string:
            return escaped(text)
        if not self.name:
            head, brace, rest = (self._bare + text).partition("{")
            self._bare = "" if brace else head
            self.is_broken = len(head) > MAX_HEAD
            if not brace:
                return ""
            self._begin("".join(head.split()).removeprefix(PREFIX))
            if self.is_broken:
                return ""
            self._next, text = self._schema, brace + rest
        return "".join(map(self._lexeme, LEXEMES.findall(text)))

    def mark(self, mark: Mark) -> str:
        may_stand = '"' in self._order.allowed if not self._in_string else self._order.take_lexeme('"')
        self._in_string = not self._in_string
        self.is_broken = mark != "separator" or not may_stand or bool(self._bare.strip())
        return '"'

    def finish_arguments(self) -> str:
        self.is_broken |= bool(self._containers) or not self.name
        return ""

    def _lexeme(self, text: str) -> str:
        if text not in MARKS_IN_JSON:
            self._bare += text
            self.is_broken |= not self._containers and bool(text.strip())
            return ""
        bare, self._bare = self._bare.strip(), ""
        lexemes = [*(('"' if text == ":" else "s") * bool(bare)), text]
        self.is_broken |= not all(map(self._order.take_lexeme, lexemes))
        if text in "{[":
            self._containers.append((text, self._next))
        if text in "[,":
            self._next = self._below(None)
        if text == ":":
            key = bare.strip('"')
            self._next = self._below(key)
            return f"{quoted(key) if bare else ''}: "
        before = self._value(bare) if bare and text not in "{[" else ""
        if text in "}]":
            self._containers = self._containers[:-1]
        return before + MARKS_IN_JSON[text]

    def _value(self, bare: str) -> str:
        try:
            return quoted(bare_value(bare, schema_types(self._next, self._schema)))
        except NoArguments:
            self.is_broken = True
            return ""

    def _below(self, key: str | None) -> Any:
        """Return the schema of property *key* in the open object, or of an item in the open array if *key* is None."""
        bracket, schema = self._containers[-1] if self._containers else ("", None)
        if key is None and bracket == "{":
            return None
        return schema_below(schema, key, self._schema)


def limits(function: form.FunctionConstraint, enforced: SupportedSchema) -> SupportedSchema:
    """Refuse or drop what the form's grammar does not enforce. Raises InvalidValue and UnsupportedParameter."""
    for place, schema in form.parts_of(function.place, enforced.schema):
        if any(not name or set(name) & MARKS for name in _mapping(schema.get("properties"))):
            raise InvalidValue(f"`{place}.properties`: a name has none of {' '.join(sorted(MARKS))}.", place)
    return form.without(UNENFORCED, function, enforced)


@dataclass
class _Rules:
    """The grammar rules for one function's arguments, one rule per schema. References resolve within *root*."""

    prefix: str
    root: Schema
    quote: str
    names: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def value(self, schema: Any) -> str:
        """Return the name of the rule for values of *schema*."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self.names:
            # The name comes before the right side, which may refer to the same schema.
            self.names[key] = f"{self.prefix}_{len(self.names)}"
            self.lines.append(f"{self.names[key]}: {' | '.join(self._alternatives(schema))}")
        return self.names[key]

    def _alternatives(self, schema: Any) -> Iterator[str]:
        if not isinstance(schema, dict):
            yield self.value({})
        elif isinstance(reference := schema.get("$ref"), str):
            yield self.value(self.root if reference == "#" else referred(reference, self.root))
        elif "const" in schema or isinstance(schema.get("enum"), list):
            yield from (self.literal(one) for one in ([schema["const"]] if "const" in schema else schema["enum"]))
        elif options := [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]:
            yield from map(self.value, options)
        else:
            types = schema.get("type", "object" if "properties" in schema else EVERY_TYPE)
            for one in [types] if isinstance(types, str) else _list(types):
                yield self._of_type(one, schema)

    def _of_type(self, kind: str, schema: Schema) -> str:
        match kind:
            case "string":
                lengths = f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"
                return f"{self.quote} /(?s:.){lengths}/ {self.quote}"
            case "array":
                return self._array(self.value(schema.get("items")), schema)
            case "object":
                return self._object(schema)
        bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        return form.json_rule({"type": kind, **{key: schema[key] for key in bounds if key in schema}})

    def literal(self, value: Any) -> str:
        """Return the terminals of one value."""
        if isinstance(value, str):
            return f"{self.quote} {form.quoted(value)} {self.quote}" if value else f"{self.quote} {self.quote}"
        if isinstance(value, list):
            return " ".join(['"["', *_joined(map(self.literal, value)), '"]"'])
        if isinstance(value, dict):
            pairs = (f"{form.quoted(key + ':')} {self.literal(value[key])}" for key in sorted(value, key=str.lower))
            return " ".join(['"{"', *_joined(pairs), '"}"'])
        return form.quoted(json.dumps(value))

    def _array(self, item: str, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        repeated = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        several = f'"[" {item} {repeated} "]"'
        return several if least else f'"[" "]" | {several}'

    def _object(self, schema: Schema) -> str:
        properties = _mapping(schema.get("properties"))
        required = set(_list(schema.get("required")))
        if not properties and schema.get("additionalProperties") is not False:
            pair = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {self.value(schema.get("additionalProperties"))}'
            return f'"{{" "}}" | "{{" {pair} ("," {pair})* "}}"'
        keys = sorted(properties, key=str.lower)
        first = self._pairs(keys, properties, required, is_first=True)
        return f'"{{" {first} "}}"' if first else '"{" "}"'

    def _pairs(self, keys: list[str], properties: Mapping[str, Any], required: set[str], *, is_first: bool) -> str:
        """Return a rule's right side for pairs of some of *keys*, in order, separated by commas.

        Unless *is_first*, a comma also precedes the first pair.
        """
        if not keys:
            return ""
        key, *others = keys
        value = self.value(properties[key])
        rest = self._named(others, properties, required, is_first=False)
        pair = f"{form.quoted(('' if is_first else ',') + key + ':')} {value} {rest}".rstrip()
        if key in required:
            return pair
        left = self._named(others, properties, required, is_first=is_first)
        return f"({pair} | {left or chr(34) * 2})"

    def _named(self, keys: list[str], properties: Mapping[str, Any], required: set[str], *, is_first: bool) -> str:
        """Return the name of a rule for `_pairs`, so that the grammar does not double with each optional key."""
        if not keys:
            return ""
        name = f"{self.prefix}_{'first' if is_first else 'more'}_{len(self.lines)}_{len(keys)}"
        key = json.dumps([keys, sorted(required), is_first, properties], sort_keys=True)
        if key not in self.names:
            self.names[key] = name
            self.lines.append(f"{name}: {self._pairs(keys, properties, required, is_first=is_first)}")
        return self.names[key]


def _rules(index: int, function: form.FunctionConstraint, tokens: form.ToolCallTokens) -> Iterator[str]:
    rules = _Rules(f"value_{index}", function.parameters, form.tag(tokens.separator_id))
    arguments = rules.value({**function.parameters, "type": "object"})
    opening = form.quoted(f"{PREFIX}{function.name}")
    yield f"call_{index}: {form.tag(tokens.begin_id)} {opening} {arguments} {form.tag(tokens.end_id)}"
    yield from rules.lines


def _joined(pieces: Iterator[str]) -> Iterator[str]:
    """Yield *pieces* with commas between them."""
    for number, piece in enumerate(pieces):
        yield f'"," {piece}' if number else piece


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


FORMAT = form.ToolFormat(TAGS, parse, Scanner, Pieces, _rules, limits, between="")
