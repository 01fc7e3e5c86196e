"""Finds why a JSON schema cannot be enforced: the keyword at fault, and the keywords that it contradicts.

The compiler says only that it failed, and some parts fail harmlessly, such as an optional property that no value can
match. So the part at fault is the one whose removal lets the rest compile.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any, Final, NamedTuple

from saccade.errors import InvalidValue
from saccade.grammars.schema_places import Schema, Subschema, excerpt, parts, place_of, pointed_at, pointer, steps

MAX_TRIALS: Final = 256
MAX_SECONDS: Final = 1.0
"""Compilations, and processor time for them. Then the error names the smallest part found so far."""

MAX_EXPANSIONS: Final = 4
"""References and combinations within one another whose keywords are told apart."""

DEFINITIONS: Final = ("$defs", "definitions")
DEFINITION: Final = re.compile(r"#/(\$defs|definitions)/[^/]*")

BLAMED_FIRST: Final = (
    *("required", "minProperties", "minItems", "minLength", "multipleOf", "minimum", "exclusiveMinimum"),
    *("const", "enum", "pattern", "format", "oneOf", "anyOf", "allOf", "$ref"),
    *("maxProperties", "maxItems", "maxLength", "maximum", "exclusiveMaximum"),
    *("prefixItems", "items", "properties", "patternProperties", "additionalProperties", "type"),
)
"""Of keywords that contradict one another the first here is named: what asks for something, before what forbids it."""

HINTS: Final = {
    "oneOf": " Alternatives of oneOf must exclude one another.",
    "pattern": " Patterns have no look-around and no back references.",
}


class _Unit(NamedTuple):
    """A keyword and its value, in the schema at *place*."""

    place: str
    keyword: str
    value: Any

    @property
    def name(self) -> str:
        return f"{self.place}.{self.keyword}"

    @property
    def rank(self) -> int:
        return BLAMED_FIRST.index(self.keyword) if self.keyword in BLAMED_FIRST else len(BLAMED_FIRST)


def find_fault(root: Schema, param: str, compiles: Callable[[Schema], bool]) -> InvalidValue:
    """Return an error that names the keyword at fault in *root*, a schema that does not compile."""
    trials = _Trials(root, param, compiles)
    schema, place = trials.broken_definition() or (trials.root, param)
    while True:
        part, schema = trials.part_at_fault(schema, place)
        if part is None:
            break
        schema, place = part.schema, part.place
    keywords = trials.keywords(schema, place)
    units = sorted(trials.fewest(keywords), key=lambda unit: unit.rank)
    if trials.are_used_up:
        units = []
    if len(units) < 2:
        first = units[0].name if units else place
        hint = HINTS.get(units[0].keyword, "") if units else ""
        message = f"`{first}` cannot be enforced: it is wrong, impossible to satisfy, or too large.{hint}"
        return InvalidValue(message, first)
    first, names = units[0].name, trials.names_at_fault(keywords, units[0]) if units[0].keyword == "required" else []
    # A type that all of them have explains nothing.
    others = [unit for unit in units[1:] if unit.keyword != "type"] or units[1:]
    unmet = f" ({', '.join(excerpt(name) for name in names[:3])})" if names else ""
    rest = " and ".join(f"`{unit.name}`" for unit in others[:4])
    message = f"`{first}`{unmet} cannot hold together with {rest}: no value matches all of them, or they are too large."
    return InvalidValue(message, first)


class _Trials:
    """Compiles parts of *root*. Once the trials are used up, every part counts as compiling."""

    def __init__(self, root: Schema, param: str, compiles: Callable[[Schema], bool]) -> None:
        self.root = _self_contained(root)
        self._param = param
        self._compiles = compiles
        self._definitions: dict[str, Schema] = {
            word: dict(self.root[word]) for word in DEFINITIONS if word in self.root
        }
        self._num_left = MAX_TRIALS
        self._until = time.process_time() + MAX_SECONDS

    @property
    def are_used_up(self) -> bool:
        return self._num_left < 0 or time.process_time() > self._until

    def _fails(self, schema: Schema) -> bool:
        self._num_left -= 1
        return not self.are_used_up and not self._compiles({**schema, **self._definitions})

    def broken_definition(self) -> tuple[Schema, str] | None:
        """Return the definition at fault and its place, or None if there is none.

        In later trials, broken definitions allow anything.
        """
        named = [(word, name, one) for word in self._definitions for name, one in self._definitions[word].items()]
        broken = [(word, name, one) for word, name, one in named if isinstance(one, dict) and self._fails(one)]
        for word, name, _ in broken:
            self._definitions[word][name] = True
        if not broken or self._fails(self.root):
            return None
        fault = broken[0]
        for word, name, one in broken:
            self._definitions[word][name] = one
            if self._fails(self.root):
                fault = word, name, one
                break
            self._definitions[word][name] = True
        self._definitions[fault[0]][fault[1]] = True
        return fault[2], place_of(_pointer_of(fault[0], fault[1]), self._param)

    def part_at_fault(self, schema: Schema, place: str) -> tuple[Subschema | None, Schema]:
        """Return the part of *schema* at fault, or None if there is none, and *schema* without its failing parts."""
        inside = (part for part in parts(schema, place) if part.keyword not in DEFINITIONS)
        failing = [part for part in inside if self._fails(part.schema)]
        without = _without(schema, failing)
        if not failing or self._fails(without):
            return None, without
        for part in failing:
            if self._fails(_without(schema, [other for other in failing if other is not part])):
                return part, without
        return failing[0], without

    def keywords(self, schema: Schema, place: str) -> list[_Unit]:
        """Return the keywords of *schema*, with references and combinations expanded if the result still fails."""
        units = [*self._units(schema, place, MAX_EXPANSIONS)]
        if self._fail_together(units):
            return units
        return [_Unit(place, keyword, value) for keyword, value in schema.items() if keyword not in DEFINITIONS]

    def fewest(self, units: list[_Unit]) -> list[_Unit]:
        """Return a minimal set of *units* that fail together: without any one of them, the rest compile."""
        for unit in list(units):
            rest = [other for other in units if other is not unit]
            if self._fail_together(rest):
                units = rest
        return units

    def names_at_fault(self, units: list[_Unit], required: _Unit) -> list[str]:
        """Return the property names in *required*, one of *units*, that the others do not allow."""
        rest = [unit for unit in units if unit is not required]
        names = [name for name in required.value if isinstance(name, str)]
        return [name for name in names if self._fail_together([*rest, required._replace(value=[name])])]

    def _fail_together(self, units: list[_Unit]) -> bool:
        origins: dict[str, Schema] = {}
        for unit in units:
            origins.setdefault(unit.place, {})[unit.keyword] = unit.value
        return self._fails({"allOf": list(origins.values())})

    def _units(self, schema: Schema, place: str, num_left: int) -> Iterator[_Unit]:
        """Yield the keywords that hold if *schema* does. Of alternatives, all of which fail, take the first."""
        for keyword, value in schema.items():
            if keyword in DEFINITIONS:
                continue
            inner: list[tuple[Any, str]] = []
            if num_left and keyword == "$ref":
                word, name = steps(value[1:])
                inner = [(self._definitions[word][name], place_of(_pointer_of(word, name), self._param))]
            elif num_left and keyword in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
                members = value if keyword == "allOf" else value[:1]
                inner = [(member, f"{place}.{keyword}[{index}]") for index, member in enumerate(members)]
            if inner and all(isinstance(member, dict) for member, _ in inner):
                for member, inner_place in inner:
                    yield from self._units(member, inner_place, num_left - 1)
            else:
                yield _Unit(place, keyword, value)


def _without(schema: Schema, removed: Iterable[Subschema]) -> Schema:
    """Return *schema* with the *removed* parts replaced by schemas that allow anything."""
    result = dict(schema)
    for part in removed:
        if part.key is None:
            result[part.keyword] = True
        else:
            if result[part.keyword] is schema[part.keyword]:
                result[part.keyword] = schema[part.keyword].copy()
            result[part.keyword][part.key] = True
    return result


def _self_contained(root: Schema) -> Schema:
    """Return a copy of *root* in which all references lead to definitions, so that its parts compile alone."""
    root = deepcopy(root)
    for word in DEFINITIONS:
        if not isinstance(root.get(word), dict):
            root[word] = {}
    pending = [root]
    while pending:
        schema = pending.pop()
        pending += [part.schema for part in parts(schema, "")]
        reference = schema.get("$ref")
        if reference is None or DEFINITION.fullmatch(reference):
            continue
        schema["$ref"] = "#/$defs" + pointer(reference)
        if reference not in root["$defs"]:
            target = pointed_at(reference[1:], root)
            if isinstance(target, dict):
                target = {keyword: value for keyword, value in target.items() if keyword not in DEFINITIONS}
                pending.append(target)
            root["$defs"][reference] = target
    return root


def _pointer_of(word: str, name: str) -> str:
    """Return the pointer to the definition *name* under *word*.

    Definitions that _self_contained() adds have their references as names.
    """
    return name[1:] if name == "#" or name.startswith("#/") else pointer(word) + pointer(name)
