"""Converts arguments that a model writes as bare text to the types in their function's JSON schema."""

from collections.abc import Iterable, Mapping, Set
from typing import Any, Final

import msgspec

from saccade.grammars.schema_places import pointed_at

MAX_REFERENCES: Final = 16
_COMBINED: Final = ("anyOf", "oneOf", "allOf")
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "float": "number",
    "double": "number",
    "int": "integer",
    "long": "integer",
    "bool": "boolean",
    "str": "string",
    "dict": "object",
    "list": "array",
    "tuple": "array",
}
"""Names of types that are none of JSON Schema's; clients that write schemas of their own use them."""

_WORDS: Final[Mapping[str, object]] = {"True": True, "False": False, "None": None}
"""As templates write values of Python."""


def typed(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Return *text* as a value for the property *name* of *schema*.

    The text stays a string if it is not a value of the property's types, or if the types are unknown. If the property
    may be a string or another type, text that reads as the other type becomes that type.
    """
    return typed_as(text, property_types(name, schema))


def typed_as(text: str, types: Set[str]) -> Any:
    """Return *text* as a value of one of *types*, by the rules of typed()."""
    if not types - {"string"}:
        return text
    stripped = text.strip()
    try:
        value = _WORDS[stripped] if stripped in _WORDS else _decoded(stripped)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return text
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        value = int(value)
    return value if types & set(_types_of(value)) else text


def _decoded(text: str) -> Any:
    """Return the JSON value in *text*, whose quotes may be escaped as in a string. Raises msgspec's errors."""
    if text[:1] in ("{", "[") and '\\"' in text:
        try:
            return msgspec.json.decode(text)
        except msgspec.MsgspecError:
            text = msgspec.json.decode(f'"{text}"', type=str)
    return msgspec.json.decode(text)


def property_types(name: str, schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that *schema* declares for its property *name*; the set is empty if it declares none."""
    properties = schema.get("properties")
    return schema_types(properties.get(name) if isinstance(properties, dict) else None, schema)


def schema_types(declared: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that the schema *declared* names, with its references resolved in *root*; may be empty."""
    return {_OTHER_NAMES.get(name, name) for name in _types(declared, root, MAX_REFERENCES)}


def schema_below(declared: Any, key: str | None, root: Mapping[str, Any], num_left: int = MAX_REFERENCES) -> Any:
    """Return the schema that *declared* has for property *key*, or for items if *key* is None; None if unknown."""
    if not isinstance(declared, dict) or not num_left:
        return None
    if isinstance(reference := declared.get("$ref"), str):
        return schema_below(root if reference == "#" else referred(reference, root), key, root, num_left - 1)
    properties = declared.get("properties")
    below = declared.get("items") if key is None else properties.get(key) if isinstance(properties, dict) else None
    options = (one for combination in _COMBINED for one in _listed(declared.get(combination)))
    return below or next(filter(None, (schema_below(one, key, root, num_left - 1) for one in options)), None)


def _types(declared: Any, root: Mapping[str, Any], num_left: int) -> Iterable[str]:
    """Yield the JSON types that the schema *declared* allows, as far as it declares them."""
    if not isinstance(declared, dict) or not num_left:
        return
    match declared.get("type"):
        case str(one):
            yield one
        case list(several):
            yield from (one for one in several if isinstance(one, str))
    for value in (*_listed(declared.get("enum")), *([declared["const"]] if "const" in declared else [])):
        yield from _types_of(value)[:1]
    for combination in _COMBINED:
        for one in _listed(declared.get(combination)):
            yield from _types(one, root, num_left - 1)
    if isinstance(reference := declared.get("$ref"), str):
        yield from _types(referred(reference, root), root, num_left - 1)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema in *root* that *reference*, such as `#/$defs/City`, points to; None if there is none."""
    return pointed_at(reference[1:], root) if reference.startswith("#/") else None


def _types_of(value: Any) -> tuple[str, ...]:
    """Return the JSON types of a value, the narrowest first."""
    match value:
        case bool():
            return ("boolean",)
        case int():
            return "integer", "number"
        case float():
            return ("number",)
        case None:
            return ("null",)
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)
