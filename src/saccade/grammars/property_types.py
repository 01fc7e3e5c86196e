"""Arguments that a model writes as bare text, typed by the JSON schema of their function."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from saccade.grammars.schema_places import pointed_at

MAX_REFERENCES: Final = 16
_COMBINED: Final = ("anyOf", "oneOf", "allOf")
_WORDS: Final[Mapping[str, object]] = {"True": True, "False": False, "None": None}
"""As templates write values of Python."""


def typed(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """Return *text* as the value of the property *name* of *schema*.

    A text stays a text if it is no value of the property's types, or none of these is known. If a property may be a
    text and something else, what reads as the other is the other.
    """
    types = property_types(name, schema)
    if not types - {"string"}:
        return text
    stripped = text.strip()
    try:
        value = _WORDS[stripped] if stripped in _WORDS else msgspec.json.decode(stripped)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return text
    if isinstance(value, float) and "integer" in types and "number" not in types and value.is_integer():
        value = int(value)
    return value if types & set(_types_of(value)) else text


def property_types(name: str, schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that *schema* declares for its property *name*; none if it declares none."""
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, dict) else None
    return set(_types(declared, schema, MAX_REFERENCES))


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
    """Return the schema that *reference*, such as `#/$defs/City`, means within *root*; None if there is none."""
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
