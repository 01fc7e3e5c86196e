"""Random JSON schemas whose instances are short."""

from collections.abc import Callable
from random import Random
from typing import Any

Schema = dict[str, Any]

PATTERNS = (r"^[a-f0-9]{4,8}$", r"^(red|green|blue)$", r"^[A-Z][a-z]{0,6}( [a-z]{1,5}){0,2}$", r"^\d{1,3}(\.\d{1,2})?$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")
WORDS = ("a", "Zürich", "two words", 'with "quotes"', "back\\slash", "line\nbreak", "雪", "", "<b>", "null")
MAX_DEPTH = 3


def bounded_schema(seed: int) -> Schema:
    """Return a random schema; equal seeds give equal ones."""
    draw = Random(seed)
    root = _object(draw, MAX_DEPTH) if draw.random() < 0.7 else _schema(draw, MAX_DEPTH)
    return {**root, "$defs": {"shared": _schema(draw, 1, refers=False)}}


def _schema(draw: Random, depth: int, refers: bool = True) -> Schema:
    leaves: list[Callable[[Random], Schema]] = [_integer, _number, _text, _enum, _simple]
    if depth == 0:
        return draw.choice(leaves)(draw)
    if refers and draw.random() < 0.08:
        return {"$ref": "#/$defs/shared"}
    nested: list[Callable[[Random, int], Schema]] = [_object, _array, _tuple, _any_of]
    return draw.choice(leaves)(draw) if draw.random() < 0.45 else draw.choice(nested)(draw, depth - 1)


def _simple(draw: Random) -> Schema:
    return {"type": draw.choice(("boolean", "null", ["boolean", "null"]))}


def _integer(draw: Random) -> Schema:
    low = draw.randint(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 2000)}
    if draw.random() < 0.2:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + draw.randint(2, 300)}
    return schema


def _number(draw: Random) -> Schema:
    low = draw.randint(-50, 50)
    if draw.random() < 0.5:
        return {"type": "number", "minimum": low, "maximum": low + 10, "multipleOf": draw.choice((0.5, 0.25, 2))}
    return {"type": "number", "minimum": low + 0.5, "maximum": low + draw.randint(1, 200)}


def _text(draw: Random) -> Schema:
    kind = draw.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": draw.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": draw.choice(FORMATS)}
    least = draw.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 8)}


def _enum(draw: Random) -> Schema:
    values: list[Any] = [*draw.sample(WORDS, draw.randint(1, 4)), draw.randint(-5, 5), 1.5, True, None, {"a": [1]}]
    if draw.random() < 0.3:
        return {"const": draw.choice(values)}
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _object(draw: Random, depth: int) -> Schema:
    names = draw.sample([word for word in WORDS if word] + ["n", "kind", "é"], draw.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False,
    }


def _array(draw: Random, depth: int) -> Schema:
    least = draw.randint(0, 2)
    return {
        "type": "array", "items": _schema(draw, depth), "minItems": least, "maxItems": least + draw.randint(0, 2),
    }  # fmt: skip


def _tuple(draw: Random, depth: int) -> Schema:
    parts = [_schema(draw, depth) for _ in range(draw.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(draw: Random, depth: int) -> Schema:
    return {"anyOf": [_schema(draw, depth) for _ in range(draw.randint(2, 3))]}
