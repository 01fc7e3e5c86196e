"""Finds the schemas within a JSON schema, and their places."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

from saccade.whole_numbers import read_whole_number

Schema = dict[str, Any]

ONE: Final = ("items", "additionalProperties", "additionalItems")
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are a schema, a list of schemas, or schemas by name."""

MAX_DEPTH: Final = 64
MAX_SCHEMAS: Final = 10_000


class Subschema(NamedTuple):
    """A *schema* within another one. *place* is for people to read.

    Its parent has it under *keyword* and, if that holds several schemas, under *key*, an index or a name.
    """

    place: str
    keyword: str
    key: str | int | None
    schema: Schema

    @property
    def pointer(self) -> str:
        """The path from its parent, as a JSON pointer (RFC 6901) in a URI fragment."""
        return pointer(self.keyword) + ("" if self.key is None else pointer(str(self.key)))


def parts(schema: Mapping[str, Any], place: str) -> Iterator[Subschema]:
    """Yield the schemas directly in *schema*, which is at *place*."""
    for keyword in ONE:
        if isinstance(schema.get(keyword), dict):
            yield Subschema(f"{place}.{keyword}", keyword, None, schema[keyword])
    for keyword in LISTS:
        for index, part in enumerate(schema[keyword]) if isinstance(schema.get(keyword), list) else ():
            if isinstance(part, dict):
                yield Subschema(f"{place}.{keyword}[{index}]", keyword, index, part)
    for keyword in MAPS:
        for name, part in schema[keyword].items() if isinstance(schema.get(keyword), dict) else ():
            if isinstance(part, dict):
                yield Subschema(f"{place}.{keyword}.{excerpt(name)}", keyword, name, part)


def pointer(key: str) -> str:
    """Return *key* as one step of a JSON pointer."""
    return "/" + quote(key.replace("~", "~0").replace("/", "~1"), safe="~$")


def quote_pointer(text: str) -> str:
    """Return the JSON pointer *text*, percent-encoded where a URI requires it."""
    return "".join(map(pointer, steps(text)))


def pointed_at(pointer: str, root: Any) -> Any:
    """Return the value in *root* at the JSON *pointer*, encoded as in a URI fragment, or None if there is none."""
    value = root
    for key in steps(pointer):
        if isinstance(value, list):
            index = read_whole_number(key, len(value) - 1)
            value = None if index is None else value[index]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def place_of(pointer: str, param: str) -> str:
    """Return the place that a JSON *pointer* into the schema in *param* leads to, for people to read."""
    return param + "".join(f"[{key}]" if key.isdecimal() else f".{excerpt(key)}" for key in steps(pointer))


def steps(pointer: str) -> list[str]:
    """Return the keys and indices of a JSON *pointer*."""
    return [unquote(step).replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def excerpt(name: str) -> str:
    """Return the first 64 characters of a client's *name*, with `?` in place of all but visible ASCII."""
    return "".join(character if "!" <= character <= "~" else "?" for character in name[:64])
