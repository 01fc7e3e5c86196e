"""Decodes the content codings of request bodies (RFC 9110, 8.4.1), piece by piece.

A few bytes may decode to gigabytes. So each step takes and returns a bounded number of bytes, and the caller stops when
the body is too long.

Some proxies decode a body but keep the header. So a body that begins like JSON, a form or a PDF is not decoded.
"""

import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from saccade.errors import InvalidValue, UnsupportedContentEncoding
from saccade.gateway.parameters import printable

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

INPUT_BYTES: Final = 16 << 10
OUTPUT_BYTES: Final = 64 << 10
"""What one step takes and returns at most: the worst known input takes 1.3 ms."""

MAX_STREAMS: Final = 2048
"""Of one body. An empty one of 9 bytes takes 10 microseconds; parallel compressors write one for each 64 KiB."""

ZSTD_WINDOW_LOG: Final = 23
"""8 MiB, the limit of the coding (RFC 9659)."""

_IDENTITY: Final = "identity"
_START_BYTES: Final = 4
_PLAIN: Final = re.compile(rb"""(?:\xef\xbb\xbf)?(?:--|%PDF|[ \t\r\n]*(?:\{(?:[ \t\r\n"}]|\Z)|\Z))""")
"""The brace alone does not tell: bare deflate data may begin with it."""


class Stream(Protocol):
    """One compressed stream, with the interface of Python's lzma, bz2 and zstd decompressors."""

    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""

    @property
    def needs_input(self) -> bool:
        """Whether decompress() can return more only if it gets more input."""

    @property
    def unused_data(self) -> bytes:
        """The input after the end of the stream."""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        """Take *data* and return at most *max_length* bytes."""


class _ZlibStream:
    """Adapts zlib's decompressor, whose methods have other names, to Stream."""

    def __init__(self, window_bits: int) -> None:
        self._object = zlib.decompressobj(window_bits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        output = self._object.decompress(self._object.unconsumed_tail + data, max_length)
        self.needs_input = not self._object.unconsumed_tail and len(output) < max_length
        return output


class _PlainStream:
    """A Stream of uncompressed bytes, which ends with the body."""

    eof, needs_input, unused_data = False, True, b""

    def decompress(self, data: bytes, max_length: int, /) -> bytes:
        return data


def _deflate(start: bytes) -> Stream:
    """Return a decoder for a zlib stream, or for the raw deflate data that some clients send under the same name."""
    is_zlib = len(start) > 1 and start[0] & 0x0F == zlib.DEFLATED and (start[0] << 8 | start[1]) % 31 == 0
    return _ZlibStream(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)


def _gzip(start: bytes) -> Stream:
    return _ZlibStream(16 + zlib.MAX_WBITS)


def _zstd(start: bytes) -> Stream:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


@dataclass(frozen=True)
class Coding:
    """A content coding. *begin* takes a stream's first bytes and returns its decoder.

    If more streams may follow the first one, *next_start* matches their first bytes.
    """

    name: str
    begin: Callable[[bytes], Stream]
    next_start: re.Pattern[bytes] | None = None
    limits: str = ""


GZIP = Coding("gzip", _gzip, re.compile(rb"\x1f\x8b\x08"))
DEFLATE = Coding("deflate", _deflate)
ZSTD = Coding(
    "zstd", _zstd, re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), ", or needs more memory than 8 MiB"
)
CODINGS: Final = {"gzip": GZIP, "x-gzip": GZIP, "deflate": DEFLATE, "zstd": ZSTD}
ACCEPTED: Final = ", ".join(dict.fromkeys(coding.name for coding in CODINGS.values()))
"""The codings, as the header Accept-Encoding lists them."""

_REFUSED: Final = f"Send it with one of these as Content-Encoding: {ACCEPTED}; or as it is, without this header."


def coding_of(headers: Sequence[tuple[bytes, bytes]]) -> Coding | None:
    """Return the coding that *headers* name, or None if they name none.

    If the coding is not supported, its begin() raises UnsupportedContentEncoding. This function does not, since a proxy
    may already have decoded the body.
    """
    listed = ""
    for header, value in headers:
        if header == b"content-encoding":
            listed += f"{value.decode('latin-1')},"
    if not listed:
        return None
    names = [name for one in listed.split(",") if (name := one.strip().lower()) not in ("", _IDENTITY)]
    if not names:
        return None
    if len(names) > 1:
        return _unserved("The body is encoded more than once.", "The body is encoded more than once.")
    reason = "The body has a content coding that is not served."
    return CODINGS.get(names[0]) or _unserved(f"The coding {printable(names[0])} is not served.", reason)


def _unserved(message: str, reason: str) -> Coding:
    def begin(start: bytes) -> Stream:
        raise UnsupportedContentEncoding(f"{message} {_REFUSED}", reason=reason)

    return Coding("unserved", begin)


class EncodedBody:
    """A body that arrives in *coding*: feed() takes its pieces, and each decode() does one step.

    *has_more* says whether another step can decode something before the next piece.
    """

    def __init__(self, coding: Coding) -> None:
        self.has_more = False
        self._coding = coding
        self._input = b""
        self._is_whole = False
        self._stream: Stream | None = None
        self._num_streams = 0

    def feed(self, piece: bytes, is_last: bool) -> None:
        """Take the next *piece* from the wire."""
        self._input += piece
        self._is_whole = is_last
        self.has_more = True

    def decode(self) -> bytes:
        """Return at most OUTPUT_BYTES of the body, perhaps none.

        Raises InvalidValue if the bytes are not in the coding, end too early, or are followed by other bytes. Raises
        UnsupportedContentEncoding if the coding is not supported.
        """
        self._stream = stream = self._stream or self._begin()
        if stream is None:
            self.has_more = False
            return b""
        piece = b""
        if stream.needs_input:
            piece, self._input = self._input[:INPUT_BYTES], self._input[INPUT_BYTES:]
        try:
            output = stream.decompress(piece, OUTPUT_BYTES)
        except (zlib.error, zstd.ZstdError) as error:
            raise InvalidValue(
                f"The body is not valid {self._coding.name} data{self._coding.limits}. Compress it anew, or send it as "
                "it is, without Content-Encoding."
            ) from error
        if stream.eof:
            self._input = stream.unused_data + self._input
            self._stream = None
        elif stream.needs_input and not self._input:
            if self._is_whole and not isinstance(stream, _PlainStream):
                raise InvalidValue(f"The body ends before its {self._coding.name} data does; send all of it.")
            self.has_more = False
        return output

    def _begin(self) -> Stream | None:
        """Return the stream at the beginning of the input, or None if too little input has arrived."""
        if len(self._input) < _START_BYTES and not self._is_whole:
            return None
        if not self._num_streams and _PLAIN.match(self._input):
            return _PlainStream()
        if self._num_streams:
            if not self._input:
                return None
            name, next_start = self._coding.name, self._coding.next_start
            if next_start is None or not next_start.match(self._input):
                raise InvalidValue(f"Bytes follow the end of the body's {name} data; send nothing after it.")
            if self._num_streams == MAX_STREAMS:
                raise InvalidValue(f"The body has more than {MAX_STREAMS} {name} streams; send one.")
        self._num_streams += 1
        return self._coding.begin(self._input[:_START_BYTES])
