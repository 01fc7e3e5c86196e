"""Kimi-K2's calls in a section of tags, and the tools in its templates' form: TypeScript types.

A call is `functions.NAME:INDEX`, a separator, and its arguments as JSON. The template's variable `tools_ts_str`
declares the tools. Source of its form: the releases' tool_declaration_ts.py and tokenization_kimi.py. As there, keys
are sorted first. If the form cannot express the schema of one tool, the template itself declares all tools as JSON.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from saccade.models.tool_formats import form
from saccade.models.tool_formats.call_pieces import JsonCallPieces, Mark
from saccade.models.tool_formats.call_scanner import JSON_OTHERS, MAX_HEAD, Nesting, SectionScanner

TAGS = form.ToolTags(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_argument_begin|>",
)
CALL_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


INDENT: Final = "  "
SELF: Final = "parameters"
"""The type of a function's parameters, if a schema in them refers to the whole."""

DEFINITIONS: Final = "#/$defs/"
SEVERAL: Final = MappingProxyType(
    {
        "string": "string",
        "number": "number",
        "integer": "number",
        "boolean": "boolean",
        "null": "null",
        "object": "{}",
        "array": "Array<any>",
    }
)
"""The names of types if a schema has a list of types."""

BOUNDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "array": ("maxItems", "minItems"),
        "integer": ("maximum", "minimum"),
        "number": ("maximum", "minimum"),
        "string": ("maxLength", "minLength", "pattern"),
    }
)
"""Keywords that become comments, by type."""

PYTHON_TYPES: Final[Mapping[str, tuple[type, ...]]] = MappingProxyType(
    {"string": (str,), "number": (int, float), "integer": (int,), "boolean": (bool,)}
)


def parse(parts: Sequence[str], functions: form.Declared) -> form.ParsedCall | None:
    """Parse `functions.NAME:INDEX`, which is also the call's id, and the arguments after the separator."""
    if len(parts) != 2:
        return None
    call_id, arguments = parts[0].strip(), form.json_of(parts[1])
    named = CALL_ID.fullmatch(call_id)
    if named is None or named["name"] not in functions or not isinstance(arguments, dict):
        return None
    return form.ParsedCall(named["name"], form.to_json(arguments), call_id)


class Scanner(SectionScanner):
    """Follows a call's name and JSON. A string ends at its closing quote; only a string may hold a second separator."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._json = Nesting(JSON_OTHERS)

    @property
    def in_value(self) -> bool:
        return self._json.in_string

    @property
    def is_whole(self) -> bool:
        return self._json.is_whole

    def is_head(self, text: str) -> bool:
        named = CALL_ID.fullmatch(text.strip())
        return named is not None and named["name"] in self._names

    def add_text(self, text: str) -> None:
        super().add_text(text)
        if len(self._pieces) > 1:
            self._json.push_text(text)
            self.is_broken = self._json.is_broken

    def separate(self, text: str) -> None:
        if len(self._pieces) > 1:
            self.add_text(text)
        else:
            super().separate(text)


class Pieces(JsonCallPieces):
    """Reads a call's id, which contains the function's name, and its JSON after the separator."""

    def __init__(self, functions: form.Declared) -> None:
        super().__init__(functions)
        self._head = ""

    def text(self, text: str) -> str:
        if self.name:
            return self._arguments(text)
        self._head += text
        self.is_broken = len(self._head) > MAX_HEAD
        return ""

    def mark(self, mark: Mark) -> str:
        named = CALL_ID.fullmatch(self._head.strip())
        if mark != "separator" or self.name or named is None:
            return super().mark(mark)
        self.id = self._head.strip()
        self._begin(named["name"])
        return ""


def _rules(index: int, function: form.FunctionConstraint, tokens: form.ToolCallTokens) -> Iterator[str]:
    name = f"{form.quoted(f'functions.{function.name}:')} /[0-9]{{1,3}}/"
    ends = form.tag(tokens.separator_id), form.tag(tokens.end_id)
    yield f"call_{index}: {form.tag(tokens.begin_id)} {name} {ends[0]} arguments_{index} {ends[1]}"
    yield f"arguments_{index}: {form.json_rule(function.parameters)}"


class _CannotSay(Exception):
    """The form cannot express a schema."""


def tool_variables(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the template's variables for *tools*: with sorted keys and, if possible, as TypeScript."""
    ordered = form.with_sorted_keys(list(tools))
    try:
        functions = "\n".join(_function(tool["function"]) for tool in ordered)
    except _CannotSay:
        return {"tools": ordered}
    return {"tools": ordered, "tools_ts_str": f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"}


def _function(function: Mapping[str, Any]) -> str:
    """Return the declarations of one function: interfaces for its references, and its type."""
    parameters = function.get("parameters") or {}
    references = _References()
    references.read_object(parameters)
    lines, whole = [], SELF
    if references.has_self:
        fields = ",\n".join(_fields(parameters, parameters.get("properties", {}), INDENT))
        lines.append(f"interface {SELF} {{\n{fields}\n}}" if fields else f"interface {SELF} {{}}")
    else:
        whole = _object(parameters, "")
    for name, schema in list(references.definitions.items()):
        references.read_schema(schema)
        if not isinstance(schema, dict):
            raise _CannotSay
        lines.append(f"{_comment(schema.get('description'), '')}interface {name} {_type(schema, '')}")
    description = _comment(function.get("description"), "")
    return "\n".join([*lines, f"{description}type {function['name']} = (_: {whole}) => any;"])


class _References:
    """The references in one function's schemas, read in order: a definition must come before references to it."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.has_self = False

    def read_object(self, schema: Mapping[str, Any]) -> None:
        """Note the definitions in *schema*, and read its properties. Raises _CannotSay."""
        self.definitions.update(_mapping(schema.get("$defs") or {}))
        if isinstance(schema.get("additionalProperties"), dict):
            self.read_schema(schema["additionalProperties"])
        for declared in _mapping(schema.get("properties", {})).values():
            self.read_schema(declared)

    def read_schema(self, schema: Any) -> None:
        """Read one schema. Raises _CannotSay."""
        if isinstance(schema, bool):
            return
        match _mapping(schema):
            case {"$ref": reference}:
                self._resolve(reference)
            case {"anyOf": list(parts)}:
                for part in parts:
                    self.read_schema(part)
            case {"anyOf": _}:
                raise _CannotSay
            case {"enum": values}:
                _check_enum(values, schema)
            case {"type": list(types)} if all(isinstance(one, str) and one in SEVERAL for one in types):
                pass
            case {"type": "object"}:
                self.read_object(schema)
            case {"type": "array"}:
                self.read_schema(schema.get("items") or True)
            case {"type": str()}:
                pass
            case {**keywords} if keywords:
                raise _CannotSay

    def _resolve(self, reference: Any) -> None:
        if reference == "#":
            self.has_self = True
            return
        if not isinstance(reference, str) or not reference.startswith(DEFINITIONS):
            raise _CannotSay
        _mapping(self.definitions.get(reference.split("/")[-1]))


def _type(schema: Any, indent: str) -> str:
    """Return the TypeScript type of *schema*, which has been read."""
    match schema:
        case bool():
            return "any" if schema else "null"
        case {"$ref": reference}:
            return SELF if reference == "#" else str(reference.split("/")[-1])
        case {"anyOf": parts}:
            return " | ".join(_type(part, indent) for part in parts)
        case {"enum": values}:
            return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)
        case {"type": list(types)}:
            return " | ".join(SEVERAL[one] for one in types)
        case {"type": "object"}:
            return _object(schema, indent)
        case {"type": "array"}:
            return _array(schema.get("items") or True, indent)
        case {"type": "integer"}:
            return "number"
        case {"type": name}:
            return str(name)
    return "any"


def _object(schema: Mapping[str, Any], indent: str) -> str:
    """Return an object's type; required properties come first."""
    properties, required = schema.get("properties", {}), _required(schema)
    names = sorted(properties, key=lambda name: (name not in required, name))
    fields = list(_fields(schema, names, indent + INDENT))
    others = schema.get("additionalProperties")
    if others is not None:
        if not isinstance(others, bool | dict):
            raise _CannotSay
        kind = _type(others, indent + INDENT) if isinstance(others, dict) else "any" if others else "never"
        fields.append(f"{indent}{INDENT}[k: string]: {kind}")
    body = ",\n".join(fields)
    return f"{{\n{body}\n{indent}}}" if body else "{}"


def _fields(schema: Mapping[str, Any], names: Sequence[str] | Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the properties *names* of *schema*, with their comments."""
    required = _required(schema)
    for name in names:
        declared = schema["properties"][name]
        default = declared.get("default") if isinstance(declared, dict) else None
        note = "" if default is None else f"{indent}// Default: {_value(default)}\n"
        mark = "" if name in required else "?"
        yield f"{_comments(declared, indent)}{note}{indent}{name}{mark}: {_type(declared, indent)}"


def _array(item: Any, indent: str) -> str:
    inner = indent + INDENT
    comments = _comments(item, inner)
    if not comments:
        return f"Array<{_type(item, indent)}>"
    return f"Array<\n{comments}{inner}{_type(item, inner)}\n{indent}>"


def _comments(schema: Any, indent: str) -> str:
    """Return the lines before a type: its description, and its bounds."""
    if isinstance(schema, bool):
        return ""
    kind = None if {"$ref", "anyOf", "enum"} & schema.keys() else schema.get("type")
    keywords = BOUNDS.get(kind, ()) if isinstance(kind, str) else ()
    bounds = ", ".join(f"{keyword}: {schema[keyword]}" for keyword in keywords if keyword in schema)
    return _comment(schema.get("description"), indent) + (f"{indent}// {bounds}\n" if bounds else "")


def _comment(description: Any, indent: str) -> str:
    """Return *description* as comments, each with its line break."""
    if not description:
        return ""
    if not isinstance(description, str):
        raise _CannotSay
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in description.split("\n"))


def _value(default: Any) -> str:
    return repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    names = schema.get("required", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _CannotSay
    return frozenset(names)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _CannotSay
    return value


def _check_enum(values: Any, schema: Mapping[str, Any]) -> None:
    """Raise _CannotSay unless each value is null or of the declared type, which may be one type or null."""
    if not isinstance(values, list):
        raise _CannotSay
    declared = schema.get("type")
    if isinstance(declared, list):
        if len(declared) not in (1, 2) or (len(declared) == 2 and "null" not in declared):
            raise _CannotSay
        declared = next((one for one in declared if one != "null"), "null")
    allowed = PYTHON_TYPES.get(declared) if isinstance(declared, str) else None
    if allowed is not None and not all(value is None or isinstance(value, allowed) for value in values):
        raise _CannotSay


FORMAT = form.ToolFormat(TAGS, parse, Scanner, Pieces, _rules, variables=tool_variables)
