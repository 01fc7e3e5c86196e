"""Content codings are decoded in bounded steps, and what is not whole, sound and alone is refused."""

import codecs
import contextlib
import gzip
import random
import zlib
from collections.abc import Callable
from itertools import product

import encoded
import pytest
from tables import table

from saccade.errors import InvalidValue, UnsupportedContentEncoding
from saccade.gateway.server.content_coding import (
    DEFLATE,
    GZIP,
    INPUT_BYTES,
    MAX_STREAMS,
    OUTPUT_BYTES,
    ZSTD,
    Coding,
    EncodedBody,
    coding_of,
    zstd,
)

CODINGS = {"gzip": GZIP, "deflate": DEFLATE, "zstd": ZSTD}
TEXT = b'{"prompt": "%b"}' % (bytes(range(32, 127)) * 30)
LARGE = b'{"prompt": "%b"}' % (b"0123456789" * 50_000)
SMALL = b"{}"
SKIPPED = b"\x5a\x2a\x4d\x18\x03\0\0\0abc"
"""A zstd frame that a decoder skips (RFC 8878, 3.1.2)."""


def decode(coding: Coding, data: bytes, piece_bytes: int = INPUT_BYTES) -> bytes:
    """Decode *data*, which arrives in pieces."""
    body = EncodedBody(coding)
    output = bytearray()
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)] or [b""]
    for number, piece in enumerate(pieces, 1):
        body.feed(piece, number == len(pieces))
        while body.has_more:
            step = body.decode()
            assert len(step) <= OUTPUT_BYTES
            output += step
    return bytes(output)


@table("header, encode", encoded.ENCODERS.values(), ids=encoded.ENCODERS)
@table("piece_bytes", [1, 3, 7, 1000, INPUT_BYTES])
@table("content", [TEXT, codecs.BOM_UTF8 + TEXT])
def test_every_split_decodes_to_the_body(
    header: str, encode: Callable[[bytes], bytes], piece_bytes: int, content: bytes
) -> None:
    """Bare deflate data of a byte order mark begins with a brace, as JSON does."""
    coding = coding_of([(b"content-encoding", header.encode())])
    assert (coding is None) == (header in ("", "identity"))
    assert coding is None or decode(coding, encode(content), piece_bytes) == content


@table("coding, encode", [(GZIP, gzip.compress), (DEFLATE, zlib.compress), (ZSTD, zstd.compress)], ids=CODINGS)
@table("content", [b"", SMALL, LARGE, LARGE[:OUTPUT_BYTES], LARGE[: 2 * OUTPUT_BYTES]])
@table("piece_bytes", [5, 100_000])
def test_every_length_decodes_to_the_body(
    coding: Coding, encode: Callable[[bytes], bytes], content: bytes, piece_bytes: int
) -> None:
    assert decode(coding, encode(content), piece_bytes) == content


JOINED = {
    "gzip members": (GZIP, gzip.compress(TEXT) + gzip.compress(b"") + gzip.compress(SMALL), TEXT + SMALL),
    "zstd frames": (ZSTD, zstd.compress(TEXT) + zstd.compress(b"") + zstd.compress(SMALL), TEXT + SMALL),
    "a zstd frame that is skipped": (ZSTD, SKIPPED + zstd.compress(TEXT) + SKIPPED, TEXT),
}


@table("name", JOINED)
@table("piece_bytes", [1, 5, 100_000])
def test_streams_in_a_row_are_one_body(name: str, piece_bytes: int) -> None:
    coding, data, content = JOINED[name]
    assert decode(coding, data, piece_bytes) == content


PLAIN = [b"", b"{}", b" {}", b"\r\n\t {}", b"\r{}", b" " * 20_000 + b"{}", b"\xef\xbb\xbf{}", b"  ", b"--b\r\nContent"]


@table("coding", CODINGS.values(), ids=CODINGS)
@table("content", PLAIN)
@table("piece_bytes", [1, 5, 100_000])
def test_body_that_a_proxy_has_decoded_is_taken_as_it_is(coding: Coding, content: bytes, piece_bytes: int) -> None:
    if piece_bytes > 1 or len(content) < 1000:
        assert decode(coding, content, piece_bytes) == content


def with_window(log: int) -> bytes:
    """A zstd frame that needs a window of that size."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    return compressor.compress(TEXT) + compressor.flush()


def test_zstd_window_has_the_limit_of_the_coding() -> None:
    assert decode(ZSTD, with_window(23)) == TEXT
    with pytest.raises(InvalidValue, match="not valid zstd data, or needs more memory than 8 MiB"):
        decode(ZSTD, with_window(24))


SOUND = {"gzip": gzip.compress(TEXT), "deflate": zlib.compress(TEXT), "zstd": encoded.zstd_streamed(TEXT)}
DAMAGED = {
    **{f"{name}, byte {place}": (name, data[:place] + b"\xff\xff" + data[place + 2 :]) for name, data in SOUND.items() for place in (0, 2)},
    **{f"{name}, checksum": (name, data[:-4] + bytes(4)) for name, data in SOUND.items()},
    "text as gzip": ("gzip", b"hello, world"),
    "text as zstd": ("zstd", b"hello, world"),
    "an array as gzip": ("gzip", b'["a"]'),
    "gzip as zstd": ("zstd", SOUND["gzip"]),
    "zstd as gzip": ("gzip", SOUND["zstd"]),
}  # fmt: skip


@table("name", DAMAGED)
@table("piece_bytes", [1, 100_000])
def test_damaged_data_is_refused(name: str, piece_bytes: int) -> None:
    coding, data = DAMAGED[name]
    with pytest.raises(InvalidValue, match=f"is not valid {coding} data.*without Content-Encoding"):
        decode(CODINGS[coding], data, piece_bytes)


@table("coding", SOUND)
@table("num_left", [1, 4, 8, 20, 100])
@table("piece_bytes", [1, 100_000])
def test_truncated_data_is_refused(coding: str, num_left: int, piece_bytes: int) -> None:
    with pytest.raises(InvalidValue, match=f"ends before its {coding} data does"):
        decode(CODINGS[coding], SOUND[coding][:-num_left], piece_bytes)


@table("coding", SOUND)
@table("rest", [b"\0", b"x", b"{}", bytes(100), b"\x1f\x8b", b"\x28\xb5\x2f"])
@table("piece_bytes", [1, 100_000])
def test_bytes_after_the_end_are_refused(coding: str, rest: bytes, piece_bytes: int) -> None:
    with pytest.raises(InvalidValue, match=f"follow the end of the body's {coding} data"):
        decode(CODINGS[coding], SOUND[coding] + rest, piece_bytes)


@table("coding", SOUND)
def test_random_damage_raises_nothing_else(coding: str) -> None:
    chance = random.Random(7)
    for _ in range(500):
        data = bytearray(SOUND[coding])
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(InvalidValue):
            decode(CODINGS[coding], bytes(data))


@table("coding, stream", [(GZIP, gzip.compress(b"")), (ZSTD, zstd.compress(b""))])
def test_streams_of_one_body_are_counted(coding: Coding, stream: bytes) -> None:
    assert decode(coding, stream * MAX_STREAMS) == b""
    with pytest.raises(InvalidValue, match=f"more than {MAX_STREAMS} {coding.name} streams"):
        decode(coding, stream * (MAX_STREAMS + 1))


@table("name", encoded.BOMBS)
def test_a_step_of_a_bomb_is_as_small_as_any_other(name: str) -> None:
    body = EncodedBody(CODINGS[name])
    body.feed(encoded.BOMBS[name](1024), is_last=True)
    steps = [len(body.decode()) for _ in range(100)]
    assert max(steps) == OUTPUT_BYTES
    assert body.has_more


UNREAD = [
    ("br", "The coding br is not served"),
    ("compress", "The coding compress is not served"),
    ("gzip;q=1", "The coding gzip;q=1 is not served"),
    ("*", r"The coding \* is not served"),
    ("a\xe4" * 500, "The coding a?a?"),
    *((", ".join(names), "encoded more than once") for names in product(("gzip", "zstd", "br"), repeat=2)),
]


def named(*values: bytes) -> Coding | None:
    """The coding that headers with *values* name."""
    return coding_of([(b"content-encoding", value) for value in values])


@table("value, complaint", UNREAD)
def test_other_codings_are_refused(value: str, complaint: str) -> None:
    coding = named(value.encode("latin-1"))
    assert coding is not None
    for data in (b"\x1f\x8b\x08\0", b"x", gzip.compress(TEXT)):
        with pytest.raises(UnsupportedContentEncoding) as caught:
            decode(coding, data)
        assert complaint.replace("\\", "") in caught.value.message
        assert "gzip, deflate, zstd" in caught.value.message
        assert value not in caught.value.reason
    for content in (b"", b" {}", b"--b\r\n"):
        assert decode(coding, content) == content


def test_two_headers_are_one_list() -> None:
    twice = named(b"gzip", b"gzip")
    assert twice is not None
    with pytest.raises(UnsupportedContentEncoding, match="more than once"):
        decode(twice, gzip.compress(gzip.compress(TEXT)))
    assert named(b"identity", b"gzip") is GZIP
    assert coding_of([(b"accept-encoding", b"gzip")]) is None
