"""Read forms with files, multipart/form-data (RFC 7578): one pass over a body that is in memory, parts not nested."""

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


class Field(NamedTuple):
    """A part of a form; *filename* is None where the part is no file."""

    name: str
    filename: str | None
    content: memoryview


def parse_form(body: bytes | bytearray, headers: Sequence[tuple[bytes, bytes]]) -> list[Field]:
    """Return the parts of a form, which refer to *body*.

    Raises UnsupportedMediaType where *headers* announce no form, and InvalidValue for one that is broken.
    """
    announced = next((value for name, value in headers if name == b"content-type"), b"")
    match = _BOUNDARY.fullmatch(announced)
    if match is None:
        raise UnsupportedMediaType(NOT_A_FORM)
    delimiter = b"\r\n--" + (match[1] or match[2])
    # The first delimiter has no line break before it where the body begins with it.
    position = len(delimiter) - 2 if body.startswith(delimiter[2:]) else _behind(body, delimiter, 0)
    view = memoryview(body)
    fields: list[Field] = []
    while not body.startswith(b"--", position):
        end_of_head = body.find(b"\r\n\r\n", position, position + MAX_HEAD_BYTES)
        if end_of_head < 0 or len(fields) == MAX_PARTS or not body.startswith(b"\r\n", position):
            raise InvalidValue(MALFORMED)
        name, filename = _read_head(bytes(view[position:end_of_head]))
        start = end_of_head + 4
        position = _behind(body, delimiter, start)
        fields.append(Field(name, filename, view[start : position - len(delimiter)]))
    return fields


def _behind(body: bytes | bytearray, delimiter: bytes, start: int) -> int:
    found = body.find(delimiter, start)
    if found < 0:
        raise InvalidValue(MALFORMED)
    return found + len(delimiter)


def _read_head(head: bytes) -> tuple[str, str | None]:
    """Return the name and the file's name that the header of a part says."""
    try:
        lines = head.decode().split("\r\n")
    except UnicodeDecodeError as error:
        raise InvalidValue(MALFORMED) from error
    for match in map(_DISPOSITION.fullmatch, lines):
        if match is not None:
            said = {name.lower(): quoted or plain for name, quoted, plain in _PARAMETER.findall(match[1])}
            if "name" in said:
                return said["name"], said.get("filename")
    raise InvalidValue(MALFORMED)
