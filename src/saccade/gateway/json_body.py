"""Decodes a request's JSON into values, with error messages of our own."""

import re
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from saccade.errors import InvalidValue
from saccade.gateway.json_faults import MAX_SHOWN_BYTES, invalid, malformed
from saccade.transport.framing import UNREADABLE

_NOT_WHOLE = re.compile(r"Expected `(?:[a-z]+ \| )*int(?: \| [a-z]+)*`, got `float`")

T = TypeVar("T")


def is_given(value: Raw | UnsetType) -> bool:
    """Return whether a raw field is present, and neither null nor an empty string."""
    return value is not UNSET and bytes(value) not in (b"null", b'""')


def parse(body: bytes | bytearray | msgspec.Raw, kind: type[T]) -> T:
    """Decode the JSON in *body* as *kind*. Raises an InvalidValue that names the field."""
    return decode(body, msgspec.json.Decoder(kind))


def decode(body: bytes | bytearray | msgspec.Raw, decoder: msgspec.json.Decoder[T], name: str = "") -> T:
    """Decode the JSON in *body*, the value of the field *name*. Raises an InvalidValue that names the field.

    As in JSON Schema, a number without a fraction is an integer: 4.0 and 1e1 are integers, but strings are not.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if decoder.strict and _NOT_WHOLE.match(str(error)) and not _is_array_with_texts(body):
            # A decoder that is not strict reads 4.0, but texts as numbers, too.
            return decode(body, msgspec.json.Decoder(decoder.type, strict=False), name)
        raise invalid(str(error), name, bytes(memoryview(body)[:MAX_SHOWN_BYTES])) from error
    except RecursionError as error:
        raise InvalidValue("The body is nested too deeply.") from error
    except UNREADABLE as error:
        raise malformed(bytes(body), str(error)) from error


def _is_array_with_texts(body: bytes | bytearray | msgspec.Raw) -> bool:
    return bytes(memoryview(body)[:1]) == b"[" and b'"' in bytes(body)
