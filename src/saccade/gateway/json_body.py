"""Decodes a request's JSON body: bounds that are checked before decoding, JSON to a struct, our own error messages.

msgspec holds the interpreter's lock while it decodes, so a thread does not help: a body that could take long is refused
by its bytes. Two figures bound the work: the bytes outside data: URLs, and the number of JSON strings among them, which
is at least the number of keys, messages and parts.

An error has parts of msgspec's messages only if they match a known form, so that none repeats a client's text.
"""

import re
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from saccade.errors import BodyTooLarge, InvalidValue
from saccade.transport.framing import UNREADABLE

MAX_BYTES_BESIDE_IMAGES: Final = 12 * 2**20
"""Three times the longest text: an escaped character takes up to three times its bytes."""

MAX_STRINGS: Final = 65_536
"""Keys and values; a request with the most messages and parts needs about 50,000."""

MAX_DATA_URLS: Final = 1024
"""Further ones count as text."""

_DATA_URL: Final = b'"data:'
_MOST_ESCAPES: Final = 1 / 16
"""Share of a data: URL's characters; PHP escapes the slashes of base64, a quarter of this."""

T = TypeVar("T")
FindImage = Callable[[bytes | bytearray, int, int], int]
"""Returns the start of the first image whose marker is between two positions of a body, -1 for none.

The image starts after the opening quote of its string.
"""


def find_data_url(body: bytes | bytearray, start: int, end: int) -> int:
    """Find images in the format of OpenAI's API, a FindImage."""
    index = body.find(_DATA_URL, start, end)
    return index if index < 0 else index + len(_DATA_URL)


def check_bounds(body: bytes | bytearray, find_image: FindImage = find_data_url) -> None:
    """Raise BodyTooLarge for too many bytes outside images, and InvalidValue for too many strings.

    In valid JSON, the text from an opening quote to the next quote contains no key and no other string. So the bytes of
    images are only searched for that quote and for escapes, and not counted.
    """
    is_ascii = body.isascii()
    num_bytes = num_quotes = position = num_urls = 0
    while position < len(body):
        # Not beyond the limit: a body that is too long takes no more time than a valid one.
        limit = position + MAX_BYTES_BESIDE_IMAGES - num_bytes + 1
        image = find_image(body, position, limit) if num_urls < MAX_DATA_URLS else -1
        start = min(limit, len(body)) if image < 0 else image
        num_bytes += start - position
        if num_bytes > MAX_BYTES_BESIDE_IMAGES:
            raise _too_large()
        num_quotes += body.count(b'"', position, start)
        end = body.find(b'"', start)
        position = len(body) if end < 0 else end
        num_urls += 1
        if not _is_plain(body, start, position, is_ascii):
            num_bytes += position - start
    if num_bytes > MAX_BYTES_BESIDE_IMAGES:
        raise _too_large()
    if num_quotes > 2 * MAX_STRINGS and _num_strings(body) > MAX_STRINGS:
        raise InvalidValue(f"The body has more than {MAX_STRINGS} names and texts.")


def num_items(array: bytes) -> int:
    """Return a lower bound of the number of items in a JSON *array* of numbers."""
    return array.count(b",") + 1


def parse(body: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """Return the JSON in *body* as *kind*. Raises InvalidValue that names the field."""
    return decode(body, msgspec.json.Decoder(kind))


def decode(body: bytes | bytearray | msgspec.Raw, decoder: msgspec.json.Decoder[T], name: str = "") -> T:
    """Return the JSON in *body*, the value of the field *name*. Raises InvalidValue that names the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), name, bytes(memoryview(body)[:MAX_SHOWN_BYTES])) from error
    except RecursionError as error:
        raise InvalidValue("The body is nested too deeply.") from error
    except UNREADABLE as error:
        raise malformed(bytes(body), str(error)) from error


def _is_plain(body: bytes | bytearray, start: int, end: int, is_ascii: bool) -> bool:
    """Whether a URL decodes as fast as its bytes are copied: ASCII, few escapes."""
    if not (is_ascii or body[start:end].isascii()):
        return False
    return body.find(b"\\", start, end) < 0 or body.count(b"\\", start, end) <= (end - start) * _MOST_ESCAPES


def _num_strings(body: bytes | bytearray) -> int:
    # Pairs first: a quote after an escaped backslash is not escaped.
    return body.replace(rb"\\", b"").replace(rb"\"", b"").count(b'"') // 2


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(
        f"The request's body has more than {MAX_BYTES_BESIDE_IMAGES} bytes without the images in data: URLs."
    )


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


def malformed(body: bytes, complaint: str) -> InvalidValue:
    """Return the error for a *body* that is not JSON, with the place and a hint if *complaint* names a place."""
    if not body.strip():
        return InvalidValue("The body is empty; send a JSON object.")
    if (match := _MALFORMED.match(complaint)) is None:
        reason = "a string or bracket is not closed" if "truncated" in complaint else "its text is not valid UTF-8"
        return InvalidValue(f"The body is not valid JSON: {reason}.")
    place = int(match["place"])
    start = body.rfind(b"\n", 0, place) + 1
    line, column = body.count(b"\n", 0, place) + 1, len(body[start:place].decode(errors="replace")) + 1
    hints = (hint for fault, hint in _HINTS.items() if match["fault"].startswith(fault))
    hint = _HINTS_OF_CHARACTERS.get(body[place : place + 1]) or next(hints, "")
    if not hint and not body.lstrip().startswith(b"{"):
        hint = "send a JSON object, not a form"
    return InvalidValue(f"The body is not valid JSON: line {line}, column {column}{hint and f': {hint}'}.")


def invalid(complaint: str, field: str, value: bytes) -> InvalidValue:
    """Return the error for *field*, "" for the whole body, about which msgspec has a *complaint*.

    *value* is what the field has, or its first MAX_SHOWN_BYTES.
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
