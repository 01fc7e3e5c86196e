"""Decides which parts of a JSON schema a grammar enforces. It refuses other keywords, or drops and names them.

llguidance enforces keywords that can be checked from left to right. `not`, `uniqueItems` and similar keywords need the
whole value. So a strict schema with such a keyword is refused, and any other schema loses the keyword, which only
widens the grammar. `then` and `else` mean nothing without `if`, and are dropped with it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from saccade.errors import InvalidValue, UnsupportedParameter
from saccade.grammars.schema_fault import find_fault
from saccade.grammars.schema_places import Schema
from saccade.grammars.schema_references import resolve_references

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

SIZES: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
UNREACHED: Final = 2**31
"""A size that no value has. The library has no larger ones."""


@dataclass
class SupportedSchema:
    """A schema for answers. *dropped* lists the places of the client's keywords that were removed from it."""

    schema: Schema
    dropped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SchemaReader:
    """Reads the schemas in *param*, a field of a request. *compiles* tells whether a grammar can enforce a schema."""

    param: str
    strict: bool
    compiles: Callable[[Schema], bool]

    def read_schema(self, text: str) -> SupportedSchema:
        """Return the schema in *text*, reduced to keywords that a grammar enforces.

        Raises InvalidValue or UnsupportedParameter, which names the place of the fault.
        """
        result = SupportedSchema(self._parse(text))
        schemas = resolve_references(result.schema, self.param)
        self._clean(result, schemas)
        if self.compiles(result.schema):
            return result
        if not self.strict:
            self._widen(result, schemas)
        if self.strict or not self.compiles(result.schema):
            raise _as_written(find_fault(result.schema, self.param, self.compiles), result.dropped)
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

    def _clean(self, result: SupportedSchema, schemas: list[tuple[str, Schema]]) -> None:
        """Refuse or drop keywords that no grammar enforces."""
        for path, schema in schemas:
            _normalise(schema)
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

    def _widen(self, result: SupportedSchema, schemas: list[tuple[str, Schema]]) -> None:
        """Replace `oneOf` with `anyOf`, and drop patterns that cannot be enforced."""
        for path, schema in schemas:
            if isinstance(schema.get("oneOf"), list) and "anyOf" not in schema:
                schema["anyOf"] = schema.pop("oneOf")
                result.dropped.append(f"{path}.oneOf")
            if "pattern" in schema and not self.compiles({"type": "string", "pattern": schema["pattern"]}):
                self._drop(result, schema, "pattern", path)


def _as_written(error: InvalidValue, dropped: Sequence[str]) -> InvalidValue:
    """Return *error* with the client's `oneOf` in place of each `anyOf` that replaced one."""
    message, param = error.message, error.param or ""
    for place in dropped:  # outer places before inner ones
        if place.endswith(".oneOf"):
            widened = f"{place.removesuffix('oneOf')}anyOf"
            message = message.replace(f"`{widened}", f"`{place}")
            param = param.replace(widened, place) if param.startswith(widened) else param
    return InvalidValue(message, param)


def _normalise(schema: Schema) -> None:
    """Normalise equivalent spellings: sizes become integers, and keywords without effect are removed."""
    if not isinstance(schema.get("items"), list):
        # It applies only to what follows a list in `items`. If it is there, the library ignores `prefixItems`.
        schema.pop("additionalItems", None)
    for keyword in SIZES:
        size = schema.get(keyword)
        if isinstance(size, float) and size.is_integer():
            schema[keyword] = size = int(size)
        if keyword.startswith("max") and isinstance(size, int) and size >= UNREACHED:
            del schema[keyword]
