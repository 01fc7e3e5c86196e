"""Splits a client's bytes into requests, and decides what the HTTP parser leaves open.

The parser (llhttp, through httptools) sees one request's bytes at a time, so later bytes are read only after the answer
has been sent. A request whose end is ambiguous is refused, and its connection ends.
"""

import re
from collections.abc import Sequence

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from saccade.errors import InvalidValue, MethodNotAllowed, RequestError
from saccade.whole_numbers import read_whole_number

MAX_HEAD_BYTES = 64 << 10
"""Limit of a request's line and headers. The framing of its body (chunk sizes, extensions and ends, trailers) may take
as many bytes again as the body has so far.
"""

MAX_LENGTH = (1 << 64) - 1
"""The parser refuses larger bodies."""

EMPTY_LINE = b"\r\n\r\n"
"""Ends a head and, after the last chunk, a chunked body. The parser takes no other ends of lines."""

_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)

HEAD_TOO_LONG = f"The request's head is over the limit of {MAX_HEAD_BYTES} bytes."
NOT_HTTP = "These bytes are not the head of a request in HTTP/1.1."
NOT_CHUNKS = "The request's body is not in chunks as HTTP/1.1 defines them."
NO_PROXY = "This server is no proxy, so it does not take CONNECT."
OTHER_VERSION = "This server speaks HTTP/1.1 and HTTP/1.0; the request has another version."
OTHER_CODING = "The only Transfer-Encoding of a request may be chunked; send the body without another coding."


def body_length(version: str, headers: Sequence[tuple[bytes, bytes]]) -> int | None:
    """Return the length of a request's body in bytes, or None if it is chunked (RFC 9112, 6.3).

    Raises InvalidValue for an HTTP version other than 1.0 and 1.1, for a transfer coding other than chunked, and for a
    malformed Content-Length.
    """
    if version not in ("1.0", "1.1"):
        raise InvalidValue(OTHER_VERSION)
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings:
        if codings != [b"chunked"]:
            raise InvalidValue(OTHER_CODING)
        return None
    length = next((value for name, value in headers if name == b"content-length"), b"0")
    number = read_whole_number(length.strip(), MAX_LENGTH)
    if number is None:
        raise InvalidValue(NOT_HTTP)
    return number


class RequestReader:
    """Gives *connection*'s parser the head of a request, then its body; each read_request() stops at the end of either.

    The parser calls the connection's methods; the connection then calls begin_body() and end_body().
    """

    def __init__(self, connection: HttpToolsProtocol) -> None:
        self._connection = connection
        self._head = bytearray()
        self._is_in_body = False
        self._num_left: int | None = None
        self._last_bytes = b""

    def begin_body(self, length: int | None) -> None:
        """Record that a head has ended and a body of *length* bytes follows; None means that the body is chunked."""
        self._is_in_body = True
        self._num_left = length
        self._last_bytes = b""

    def end_body(self) -> None:
        """Record that the body has ended."""
        self._is_in_body = False

    def skip_empty_lines(self, data: bytes) -> bytes:
        """Return *data* without empty lines before a request (RFC 9112, 2.2)."""
        return data if self._head or self._is_in_body else data.lstrip(b"\r\n")

    def read_request(self, data: bytes) -> bytes:
        """Parse *data* up to the end of the head or body, and return the rest. Raises RequestError."""
        is_in_body = self._is_in_body  # The connection may find a fault in a head after it has begun the body.
        try:
            return self._read_body(data) if is_in_body else self._read_head(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error.__context__, RequestError):  # the connection's, from within the parser
                raise error.__context__ from None
            raise InvalidValue(NOT_CHUNKS if is_in_body else NOT_HTTP) from None

    def _read_head(self, data: bytes) -> bytes:
        num_before = len(self._head)
        self._head += data
        start = self._head.find(EMPTY_LINE, max(0, num_before - len(EMPTY_LINE) + 1))
        end = len(self._head) if start < 0 else start + len(EMPTY_LINE)
        if end > MAX_HEAD_BYTES:
            raise InvalidValue(HEAD_TOO_LONG)
        num_read = end - num_before
        try:
            self._connection.parser.feed_data(data[:num_read])
        except httptools.HttpParserUpgrade:
            self._read_without_upgrade(bytes(self._head[:end]))
        if start >= 0:
            self._head.clear()
        return data[num_read:]

    def _read_without_upgrade(self, head: bytes) -> None:
        """Parse *head* again without its Upgrade header, which a server may ignore (RFC 9110, 7.8).

        With that header, the parser ends the message after the head, and would take the body for another protocol.
        """
        if self._connection.parser.get_method() == b"CONNECT":
            raise MethodNotAllowed(NO_PROXY)
        self._connection.parser = httptools.HttpRequestParser(self._connection)
        self._connection.parser.feed_data(_UPGRADE.sub(b"", head))

    def _read_body(self, data: bytes) -> bytes:
        if self._num_left is None:
            return self._read_chunks(data)
        piece = data[: self._num_left]
        self._num_left -= len(piece)
        self._connection.parser.feed_data(piece)
        return data[len(piece) :]

    def _read_chunks(self, data: bytes) -> bytes:
        """Parse *data* up to each empty line in turn.

        The body ends at one of them, and only the parser knows which.
        """
        seen = self._last_bytes + data
        position = len(self._last_bytes)
        while self._is_in_body and position < len(seen):
            start = seen.find(EMPTY_LINE, max(0, position - len(EMPTY_LINE) + 1))
            end = len(seen) if start < 0 else start + len(EMPTY_LINE)
            self._connection.parser.feed_data(seen[position:end])
            position = end
        self._last_bytes = seen[max(0, position - len(EMPTY_LINE) + 1) : position]
        return seen[position:]
