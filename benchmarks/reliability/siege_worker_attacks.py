"""The attacks of a siege by workers: what each sends to its gateway, and its control."""

import struct

import msgspec
from floods import array

from benchmarks.reliability.siege_client import Target
from benchmarks.reliability.siege_workers import FLOOD_FRAMES
from saccade.protocol.engine_load import Load
from saccade.protocol.output import StepFrame

LARGE_BYTES, SHORT_BYTES = 24 << 20, 3 << 20
"""Of a frame that is over the longest one, and of one that is not."""

LOAD = msgspec.msgpack.encode(StepFrame([], load=Load()))
FRAMES = (
    b"\x91" + array(b"\x92\xa0\x90", LARGE_BYTES),
    b"\x91" + array(b"\x92\xa0\x90", SHORT_BYTES),
    b"\x92\x90" + array(b"\xa3abc", SHORT_BYTES),
    b"\x94\x90\x90\xc0" + array(b"\x92\xa0\x90", SHORT_BYTES),
)
"""Deltas without tokens, names of slots, questions."""


def http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


PING, SETTINGS = http2_frame(6, 0, 0, b"12345678"), http2_frame(4, 0, 0)
IDLE_FRAMES = (
    PING,
    SETTINGS,
    http2_frame(3, 0, 1, bytes(4)),
    http2_frame(0, 0, 1),
    http2_frame(8, 0, 0, b"\0\0\0\1"),
    http2_frame(0x20, 0, 0),
)
"""Pings, settings, resets, data without bytes, windows, and frames of no known kind."""

STORED = b"\x95" + msgspec.msgpack.encode("BlockStored") + b"\x91\x01\xc0"
BATCH = b"\x92\xcb" + bytes(8) + b"\x91" + STORED
"""A batch with one event of one block, up to its token ids."""

MOST_BATCHES = 100_000
BLOCK = BATCH + b"\xdc\0\x10" + b"\7" * 16 + b"\x10"
BATCHES = (
    BATCH + array(b"\7", LARGE_BYTES) + b"\x10",
    BATCH + array(b"\7", SHORT_BYTES) + b"\x10",
    b"\x92\xcb" + bytes(8) + array(b"\x91\xb0AllBlocksCleared", SHORT_BYTES),
    BLOCK,
)
"""Too many bytes, ids and events; and blocks without end."""


async def long_frames(target: Target, address: str, number: int) -> str:
    """Send a frame of many small objects."""
    return await target.hostile.frames.send(FRAMES[next(target.serial) % len(FRAMES)])


async def load_frame(target: Target, address: str, number: int) -> str:
    """Send a frame with the worker's load, as each worker does: the control."""
    return await target.hostile.frames.send(LOAD)


async def idle_frames(target: Target, address: str, number: int) -> str:
    """Send frames of HTTP/2 without content as quickly as they are taken."""
    frame = IDLE_FRAMES[next(target.serial) % len(IDLE_FRAMES)]
    return await target.hostile.http2.flood(frame, FLOOD_FRAMES)


async def one_ping(target: Target, address: str, number: int) -> str:
    """Send a ping: the control."""
    return await target.hostile.http2.flood(PING, 1)


async def published_batches(target: Target, address: str, number: int) -> str:
    """Publish cache events without end, in batches of any size."""
    return await target.hostile.publisher.publish(BATCHES[next(target.serial) % len(BATCHES)], MOST_BATCHES)


async def one_batch(target: Target, address: str, number: int) -> str:
    """Publish one block: the control."""
    return await target.hostile.publisher.publish(BLOCK, 1)


async def changed_description(target: Target, address: str, number: int) -> str:
    """End the stream, and describe another model at each connection."""
    target.hostile.restless.changes = True
    try:
        return await target.hostile.restless.connect_again()
    finally:
        target.hostile.restless.changes = False


async def same_description(target: Target, address: str, number: int) -> str:
    """End the stream, and describe the same model again: the control."""
    return await target.hostile.restless.connect_again()
