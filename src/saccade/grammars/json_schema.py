"""Which parts of a JSON schema a grammar enforces: other keywords are refused, or dropped and named.

llguidance enforces what can be decided from left to right. `not`, `uniqueItems` and similar keywords need the whole
value, so a strict schema that has one is refused; of another schema the keyword is dropped. A dropped keyword only
makes the grammar wider, except `else` and the like, which mean nothing without `if` and are dropped with it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from saccade.errors import InvalidValue, UnsupportedParameter

Schema = dict[str, Any]

NOT_HELD: Final = frozenset(
    {
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "disallow",
        "divisibleBy",
        "else",
        "extends",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
DEFAULTS: Final = MappingProxyType({"uniqueItems": False, "unevaluatedItems": True, "unevaluatedProperties": True})
"""Values that make a keyword meaningless."""

FORMATS: Final = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    }
)
"""Formats of strings that a grammar enforces; JSON Schema treats others as annotations."""

OPTIONS: Final = "x-guidance"
"""llguidance's own options in a schema, which clients may not set."""

ONE: Final = ("items", "additionalProperties", "additionalItems")
LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values are a schema, a list of schemas, or schemas by name."""

MAX_DEPTH: Final = 64
MAX_SCHEMAS: Final = 10_000
MAX_TRIALS: Final = 256
"""Trials of parts of a schema that fails as a whole, in order to name the part that fails."""


@dataclass
class SupportedSchema:
    """A schema that answers match; *dropped* are the places of keywords of the client's schema that it lacks."""

    schema: Schema
    dropped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SchemaReader:
    """Reads the schemas of one field of a request, *param*. *compiles* tells whether a grammar can enforce it."""

    param: str
    strict: bool
    compiles: Callable[[Schema], bool]

    def read(self, text: str) -> SupportedSchema:
        """Return the schema in *text*, all keywords of which a grammar enforces.

        Raises InvalidValue and UnsupportedParameter, which name the keyword's place.
        """
        result = SupportedSchema(self._parse(text))
        self._clean(result)
        if self.compiles(result.schema):
            return result
        if not self.strict:
            self._widen(result)
        if self.strict or not self.compiles(result.schema):
            raise self._error(result.schema)
        return result

    def _parse(self, text: str) -> Schema:
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidValue(f"`{self.param}` must be a JSON schema.", self.param) from None
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise InvalidValue(f"`{self.param}` must be a JSON schema: an object.", self.param)
        schema.pop(OPTIONS, None)
        return schema

    def _clean(self, result: SupportedSchema) -> None:
        """Refuse or drop what no grammar enforces."""
        for path, schema in _schemas(result.schema, self.param):
            reference = schema.get("$ref", "#")
            if not isinstance(reference, str) or not reference.startswith("#"):
                raise InvalidValue(
                    f"`{path}.$ref` must begin with #: schemas are not fetched from elsewhere.", f"{path}.$ref"
                )
            unheld = [keyword for keyword in schema if keyword in NOT_HELD]
            if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
                unheld.append("format")
            for keyword in unheld:
                if keyword in DEFAULTS and schema[keyword] is DEFAULTS[keyword]:
                    del schema[keyword]
                else:
                    self._drop(result, schema, keyword, path)

    def _drop(self, result: SupportedSchema, schema: Schema, keyword: str, path: str) -> None:
        if self.strict:
            raise UnsupportedParameter(
                f"`{path}.{keyword}` cannot be enforced while the answer grows; leave it out, or do not set `strict`.",
                f"{path}.{keyword}",
            )
        del schema[keyword]
        result.dropped.append(f"{path}.{keyword}")

    def _widen(self, result: SupportedSchema) -> None:
        """Replace oneOf by anyOf, and drop patterns that cannot be enforced."""
        for path, schema in _schemas(result.schema, self.param):
            if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema:
                schema["anyOf"] = schema.pop("oneOf")
                result.dropped.append(f"{path}.oneOf")
            if "pattern" in schema and not self.compiles({"type": "string", "pattern": schema["pattern"]}):
                self._drop(result, schema, "pattern", path)

    def _error(self, root: Schema) -> InvalidValue:
        """Return the error that names the smallest part of *root* that cannot be enforced."""
        definitions: Schema = {name: root[name] for name in ("$defs", "definitions") if name in root}
        failing, schema, trials = self.param, root, 0
        parts = _parts(root, self.param)
        while (part := next(parts, None)) is not None and trials < MAX_TRIALS:
            trials += 1
            if not self.compiles({**definitions, **part[1]}):
                failing, schema = part
                parts = _parts(schema, failing)
        keyword = next((name for name in ("oneOf", "pattern", "type", "enum", "$ref") if name in schema), None)
        place = failing if keyword is None else f"{failing}.{keyword}"
        return InvalidValue(
            f"`{place}` cannot be enforced: it is wrong, impossible to satisfy, or too large. Alternatives of oneOf "
            "must exclude one another, and patterns have no look-around and no back references.",
            place,
        )


def _parts(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Schema]]:
    """Yield the schemas directly in *schema*, with their places."""
    for keyword in ONE:
        if isinstance(schema.get(keyword), dict):
            yield f"{path}.{keyword}", schema[keyword]
    for keyword in LISTS:
        if isinstance(schema.get(keyword), list):
            parts = enumerate(schema[keyword])
            yield from ((f"{path}.{keyword}[{index}]", part) for index, part in parts if isinstance(part, dict))
    for keyword in MAPS:
        if isinstance(schema.get(keyword), dict):
            named = schema[keyword].items()
            yield from ((f"{path}.{keyword}.{excerpt(name)}", part) for name, part in named if isinstance(part, dict))


def _schemas(root: Schema, param: str) -> list[tuple[str, Schema]]:
    """Return *root* and all schemas in it, with their places. Raises InvalidValue for too many, or too deep ones."""
    schemas = level = [(param, root)]
    for _ in range(MAX_DEPTH):
        level = [part for path, schema in level for part in _parts(schema, path)]
        if not level:
            return schemas
        schemas = schemas + level
        if len(schemas) > MAX_SCHEMAS:
            raise InvalidValue(f"`{param}` has more than {MAX_SCHEMAS} schemas in it.", param)
    raise InvalidValue(f"`{param}` is nested more than {MAX_DEPTH} schemas deep.", param)


def excerpt(name: str) -> str:
    """Return the first 64 characters of a client's *name*, with `?` for all except visible ASCII."""
    return "".join(character if "!" <= character <= "~" else "?" for character in name[:64])
