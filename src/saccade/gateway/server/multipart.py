"""Parses forms with files (multipart/form-data, RFC 7578) in one pass over a body in memory. Parts are not nested."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from saccade.errors import InvalidValue, UnsupportedMediaType

MAX_PARTS = 16

MAX_HEAD_BYTES = 8 << 10
"""Of one part."""

NOT_A_FORM = "The request must be a form with a file: send it as multipart/form-data, with curl by -F file=@NAME."
MALFORMED = "The form is not valid multipart/form-data."

_BOUNDARY = re.compile(
    rb"multipart/form-data\s*;(?:[^\"]*;)?\s*boundary=(?:\"([^\"]{1,70})\"|([^\s;\"]{1,70}))\s*(?:;.*)?", re.IGNORECASE
)

_DISPOSITION = re.compile(r"content-disposition\s*:\s*form-data\s*((?:;.*)?)", re.IGNORECASE)
_PARAMETER = re.compile(r";\s*([\w*-]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s;\"]*))")
_ESCAPED = re.compile(r"\\([\"\\])")


class Field(NamedTuple):
    """A part of a form; *filename* is None if the part is not a file."""

    name: str
    filename: str | None
    content: memoryview


def parse_form(body: bytes | bytearray, headers: Sequence[tuple[bytes, bytes]]) -> list[Field]:
    """Return the parts of a form as views of *body*.

    Raises UnsupportedMediaType if Content-Type is not a form's, and InvalidValue if the form is malformed.
    """
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    match = _BOUNDARY.fullmatch(content_type)
    if match is None:
        raise UnsupportedMediaType(NOT_A_FORM)
    delimiter = b"\r\n--" + (match[1] or match[2])
    # A delimiter at the beginning of the body has no line break before it.
    position = len(delimiter) - 2 if body.startswith(delimiter[2:]) else _end_of_delimiter(body, delimiter, 0)
    view = memoryview(body)
    fields: list[Field] = []
    while not body.startswith(b"--", position):
        end_of_head = body.find(b"\r\n\r\n", position, position + MAX_HEAD_BYTES)
        if end_of_head < 0 or len(fields) == MAX_PARTS or not body.startswith(b"\r\n", position):
            raise InvalidValue(MALFORMED)
        name, filename = _read_head(bytes(view[position:end_of_head]))
        start = end_of_head + 4
        position = _end_of_delimiter(body, delimiter, start)
        fields.append(Field(name, filename, view[start : position - len(delimiter)]))
    return fields


def _end_of_delimiter(body: bytes | bytearray, delimiter: bytes, start: int) -> int:
    position = body.find(delimiter, start)
    if position < 0:
        raise InvalidValue(MALFORMED)
    return position + len(delimiter)


def _read_head(head: bytes) -> tuple[str, str | None]:
    """Return the name and the filename in a part's header."""
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidValue(MALFORMED) from error
    for match in map(_DISPOSITION.fullmatch, lines):
        if match is not None:
            values = _PARAMETER.findall(match[1])
            parameters = {name.lower(): _ESCAPED.sub(r"\1", quoted) or plain for name, quoted, plain in values}
            if "name" in parameters:
                return parameters["name"], parameters.get("filename")
    raise InvalidValue(MALFORMED)
