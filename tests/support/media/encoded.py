"""Request bodies in content codings: sound ones, and bombs that decode to a gibibyte."""

import gzip
import struct
import zlib
from collections.abc import Callable

from saccade.gateway.server.content_coding import zstd

MIB = 1 << 20


def raw_deflate(content: bytes) -> bytes:
    """Return *content* as deflate data without the frame of zlib."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(content) + compressor.flush()


def zstd_streamed(content: bytes) -> bytes:
    """Return *content* as a frame without its size and with a checksum, as clients write that compress as they send."""
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})
    pieces = [compressor.compress(content[start : start + 1000]) for start in range(0, len(content), 1000)]
    return b"".join(pieces) + compressor.flush()


ENCODERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "gzip in capitals": ("GZIP", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without zlib's frame": ("deflate", raw_deflate),
    "zstd": ("zstd", zstd.compress),
    "zstd as a stream": ("zstd", zstd_streamed),
    "identity": ("identity", bytes),
    "no name": ("", bytes),
    "gzip and a comma": ("gzip, ", gzip.compress),
}
"""What clients write as Content-Encoding, and how they encode."""

FOUR_TABLES = bytes.fromhex(
    "04c0810800000000a0fda93f0170200200000000687fea4f001c880000000000da9ffa130007220000000080f6a7fe"
)
"""Four blocks of nothing in deflate data, each with Huffman tables of its own (RFC 1951, 3.2.7)."""


def gzip_bomb(num_mib: int) -> bytes:
    """Return a gzip stream that decodes to that many MiB of zeros and has no end."""
    compressor = zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS)
    start = compressor.compress(b"") + compressor.flush(zlib.Z_FULL_FLUSH)
    return start + (compressor.compress(bytes(MIB)) + compressor.flush(zlib.Z_FULL_FLUSH)) * num_mib


def deflate_bomb(num_mib: int) -> bytes:
    """Return the same in zlib's frame."""
    return b"\x78\xda" + gzip_bomb(num_mib)[10:]


def zstd_bomb(num_mib: int) -> bytes:
    """Return a zstd frame of blocks of one repeated zero, 4 bytes for 128 KiB each. It has no end."""
    block = struct.pack("<I", 128 << 10 << 3 | 1 << 1)
    return b"\x28\xb5\x2f\xfd\x00\x68" + block * (8 * num_mib)


def empty_blocks(num_bytes: int) -> bytes:
    """Return a gzip stream of about that many bytes that decodes to nothing, though a decoder builds table after table."""
    start = zlib.compressobj(wbits=16 + zlib.MAX_WBITS).compress(b"")
    return start + FOUR_TABLES * (num_bytes // len(FOUR_TABLES))


def empty_frames(num_bytes: int) -> bytes:
    """Return as many zstd frames of nothing."""
    frame = zstd.compress(b"")
    return frame * (num_bytes // len(frame))


BOMBS: dict[str, Callable[[int], bytes]] = {"gzip": gzip_bomb, "deflate": deflate_bomb, "zstd": zstd_bomb}
