"""A request's body: JSON to a struct, and what is wrong with it in words of our own."""

import re
from typing import TypeVar

import msgspec

from saccade.errors import InvalidValue
from saccade.transport.framing import UNREADABLE

T = TypeVar("T")

_DETAIL = re.compile(
    r"Expected `(?P<expected>[a-z0-9 |]+)`"
    r"(?P<limit> (?:of length )?(?:[<>]=?|==) [-0-9.e+]+)?"
    r"(?:, got `(?P<got>[a-z]+)`)?"
)
_MISSING = re.compile(r"Object missing required field `(?P<field>\w+)`")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`")


def parse(body: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """Return the JSON in *body* as *kind*. Raises InvalidValue that names the field."""
    return decode(body, msgspec.json.Decoder(kind))


def decode(body: bytes | bytearray | msgspec.Raw, decoder: msgspec.json.Decoder[T], name: str = "") -> T:
    """Return the JSON in *body*, the value of the field *name*. Raises InvalidValue that names the field."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error), name) from error
    except RecursionError as error:
        raise InvalidValue("The body is nested too deeply.") from error
    except UNREADABLE as error:
        raise InvalidValue("The body is not valid JSON.") from error


def _explain(complaint: str, field: str) -> InvalidValue:
    """Turn msgspec's complaint into our own sentence; only what matches a known form is taken over."""
    path = _PATH.search(complaint)
    # A key that the client chose is not repeated: the field is enough.
    within = path["path"].removesuffix("[...]") if path else ""
    param = (f"{field}.{within}" if field and within and not within.startswith("[") else field + within) or None
    if missing := _MISSING.search(complaint):
        param = f"{param}.{missing['field']}" if param else missing["field"]
        return InvalidValue(f"`{param}` is missing.", param)
    name = f"`{param}`" if param else "The body"
    if (detail := _DETAIL.search(complaint)) is None:
        return InvalidValue(f"{name} has a value that is not accepted.", param)
    got = f", not {detail['got']}" if detail["got"] else ""
    return InvalidValue(f"{name} must be {detail['expected']}{detail['limit'] or ''}{got}.", param)
