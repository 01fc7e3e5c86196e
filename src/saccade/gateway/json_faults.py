"""Explains in plain words what is wrong with a request's JSON.

Errors use a message from msgspec only if its form is known. So they repeat nothing that a client has sent except short
numbers and broken escapes.
"""

import re
from typing import Final

from saccade.errors import InvalidValue

MAX_SHOWN_BYTES: Final = 24
"""A number of this length or more is not repeated."""

_MALFORMED = re.compile(r"JSON is malformed: (?P<fault>.+) \(byte (?P<place>[0-9]+)\)")
_HINTS: Final = {
    "trailing comma": "remove the comma before it",
    "object keys must be strings": "names stand in double quotes",
    "expected ','": "a comma is missing, or a quote before it",
    "expected ':'": "a colon is missing after a name",
    "trailing characters": "remove what follows the end of the object",
    "invalid escaped character": "write a backslash in a string as two",
}
_HINTS_OF_CHARACTERS: Final = {
    b"'": "names and strings stand in double quotes",
    b"/": "JSON has no comments",
    **dict.fromkeys((b"T", b"F", b"N"), "write true, false or null, in small letters"),
    **dict.fromkeys((b"\n", b"\r"), r"write a line break in a string as \n"),
}
_DETAIL = re.compile(
    r"Expected `(?P<expected>[a-z0-9 |]+)`"
    r"(?: (?P<length>of length )?(?P<bound>[<>]=?|==) (?P<limit>[-0-9.e+]+))?"
    r"(?:, got `(?P<got>[a-z]+)`)?"
)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`")
_NUMBER = re.compile(rb"-?[0-9][-+.0-9eE]*")
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_BOUNDS: Final = {">=": "at least", ">": "more than", "<=": "at most", "<": "less than", "==": "exactly"}
_UNITS: Final = {"str": "character", "array": "item", "object": "entry"}


_WIDE: Final = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff|\0\0\0[^\0]|[^\0]\0\0\0", re.DOTALL),
    "UTF-16": re.compile(rb"\xff\xfe|\xfe\xff|\0[^\0]|[^\0]\0", re.DOTALL),
}
"""How a body begins in other encodings: by their byte order mark, or by a character of ASCII."""

_HALF_PAIR: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u(?:d[89ab][0-9a-f]{2}(?=[^\\]|\\[^u]|\\u(?!d[c-f])[0-9a-f]{4})"
    rb"|(?<!\\ud[89ab][0-9a-f]{2}\\u)d[c-f][0-9a-f]{2}))",
    re.IGNORECASE | re.DOTALL,
)
_PAIR_BYTES: Final = 12
_PAIR_FAULTS: Final = ("surrogate", "hex escape", "truncated")


def malformed(body: bytes, complaint: str) -> InvalidValue:
    """Return the error for a *body* that is not JSON.

    If *complaint* names a place, so does the error, with a hint if there is one.
    """
    if not body.strip():
        return InvalidValue("The body is empty; send a JSON object.")
    if encoding := next((name for name, start in _WIDE.items() if start.match(body)), ""):
        return InvalidValue(f"The body is not valid JSON: its text is {encoding}; send it as UTF-8.")
    match = _MALFORMED.match(complaint)
    place = len(body) if match is None else int(match["place"])
    if any(fault in complaint for fault in _PAIR_FAULTS) and (half := _half_pair(body, place)) is not None:
        escape = body[half : half + _PAIR_BYTES // 2].decode()
        hint = f"{escape} is half of a surrogate pair; write both halves, or leave it out"
        return InvalidValue(f"The body is not valid JSON: {_position(body, half)}: {hint}.")
    if match is None:
        reason = "a string or bracket is not closed" if "truncated" in complaint else "its text is not valid UTF-8"
        return InvalidValue(f"The body is not valid JSON: {reason}.")
    hints = (hint for fault, hint in _HINTS.items() if match["fault"].startswith(fault))
    hint = _HINTS_OF_CHARACTERS.get(body[place : place + 1]) or next(hints, "")
    if not hint and not body.lstrip().startswith(b"{"):
        hint = "send a JSON object, not a form"
    return InvalidValue(f"The body is not valid JSON: {_position(body, place)}{hint and f': {hint}'}.")


def _half_pair(body: bytes, place: int) -> int | None:
    """Return the position of an escape near *place* that is only half of a surrogate pair, or None if there is none."""
    match = _HALF_PAIR.search(body, max(0, place - 2 * _PAIR_BYTES), place + _PAIR_BYTES)
    return None if match is None else match.start(1)


def _position(body: bytes, place: int) -> str:
    """Return the line and column of *place*, in words."""
    start = body.rfind(b"\n", 0, place) + 1
    line, column = body.count(b"\n", 0, place) + 1, len(body[start:place].decode(errors="replace")) + 1
    return f"line {line}, column {column}"


def invalid(complaint: str, field: str, value: bytes) -> InvalidValue:
    """Return the error for msgspec's *complaint* about *field*, which is "" for the whole body.

    *value* is the field's value, or its first MAX_SHOWN_BYTES.
    """
    path = _PATH.search(complaint)
    # The client's own key is not repeated.
    within = path["path"].removesuffix("[...]") if path else ""
    param = (f"{field}.{within}" if field and within and not within.startswith("[") else field + within) or None
    if missing := _MISSING.search(complaint):
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return InvalidValue(f"`{param}` is missing.", param)
    name = f"`{param}`" if param else "The body"
    name = f"A value in {name}" if path and path["path"].endswith("[...]") else name
    if (detail := _DETAIL.search(complaint)) is None:
        return InvalidValue(f"{name} has a value that is not accepted.", param)
    kinds = [kind for kind in detail["expected"].split(" | ") if kind != "null"] or ["null"]
    words = " or ".join(_KINDS.get(kind, kind) for kind in kinds)
    if detail["length"]:
        return InvalidValue(f"{name} must be {words} with {_bound(detail)} {_unit(kinds[0], detail['limit'])}.", param)
    is_shown = not within and len(value) < MAX_SHOWN_BYTES and _NUMBER.fullmatch(value)
    got = value.decode() if is_shown else _KINDS.get(detail["got"] or "", "").replace("whole ", "")
    return InvalidValue(
        f"{name} must be {words}{(detail['bound'] and f', {_bound(detail)}') or ''}{got and f', not {got}'}.", param
    )


def _bound(detail: re.Match[str]) -> str:
    return f"{_BOUNDS[detail['bound']]} {detail['limit'].removesuffix('.0')}"


def _unit(kind: str, limit: str) -> str:
    unit = _UNITS.get(kind, "item")
    return unit if limit == "1" else "entries" if unit == "entry" else f"{unit}s"
