"""A gateway that talks nonsense: seeded mutations of valid commands, over the native wire."""

import asyncio
import random
from typing import Any

import grpc
import msgspec

from saccade.protocol.media import MediaItem, SlotRef, Span
from saccade.protocol.request import Abort, EngineRequest, SamplingParams
from saccade.transport.credentials import NO_CREDENTIALS
from saccade.transport.framing import framed
from saccade.transport.proto.worker_pb2 import GatewayFrame
from saccade.transport.wire import stream_path

STREAM_SECONDS = 20.0
ODD: tuple[Any, ...] = (None, -1, 0, 1 << 63, 2.5, float("nan"), "", "x" * 5000, b"\xff" * 40, [], {}, [[[[]]]], True)


def valid(draw: random.Random) -> Any:
    """A command as a gateway could send it, as plain objects; its slots are nobody's."""
    token_ids = [draw.randrange(300) for _ in range(draw.randrange(1, 40))]
    slot = SlotRef(
        name=draw.choice(("saccade-1-1-0123456789abcdef", "../../etc/passwd", "")), generation=1, nbytes=3072
    )
    item = MediaItem(
        modality="image",
        content_hash=bytes(32),
        grid=(1, 2, 2),
        spans=(Span(draw.randrange(40), 1),),
        pixel_shape=(4, 768),
        slot=draw.choice((slot, None)),
        inline=draw.choice((bytes(3072), None)),
    )
    sampling = SamplingParams(max_tokens=draw.randrange(1, 6), temperature=0)
    media = (item,) * draw.randrange(3)
    request = EngineRequest(request_id=f"fuzz-{draw.random()}", token_ids=token_ids, sampling=sampling, media=media)
    command = draw.choice((request, request, Abort(request_id="nobody")))
    return msgspec.to_builtins(command, builtin_types=(bytes,))


def mutated(draw: random.Random) -> bytes:
    """One malformed frame: a field of an odd value, bytes flipped, cut off or repeated; now and then a valid one."""
    command = valid(draw)
    kind = draw.randrange(6)
    if kind < 3:
        _spoil(command, draw)
    encoded = bytearray(msgspec.msgpack.encode(command))
    if kind == 3:
        for _ in range(draw.randrange(1, 8)):
            encoded[draw.randrange(len(encoded))] = draw.randrange(256)
    elif kind == 4:
        encoded = encoded[: draw.randrange(len(encoded))] + encoded[: draw.randrange(3)]
    return bytes(encoded)


def _spoil(container: Any, draw: random.Random) -> None:
    """Replace or remove something, somewhere within."""
    places = list(container) if isinstance(container, dict) else list(range(len(container)))
    place = draw.choice(places)
    if isinstance(container[place], dict | list) and container[place] and draw.random() < 0.7:
        _spoil(container[place], draw)
    elif draw.random() < 0.2:
        del container[place]
    else:
        container[place] = draw.choice(ODD)


def send_malformed(url: str, count: int, seed: int = 0) -> None:
    """Send *count* frames to the worker at *url*, a Unix socket: half over gRPC, half over the socket beside it.

    A new stream is opened whenever the worker has ended one.
    """
    draw = random.Random(seed)
    asyncio.run(_over_grpc(url, draw, count - count // 2))
    asyncio.run(_over_unix(url, draw, count // 2))


async def _over_grpc(url: str, draw: random.Random, count: int) -> None:
    async with grpc.aio.insecure_channel(url) as channel:
        sent = 0
        while sent < count:
            call = NO_CREDENTIALS.calls(channel).Stream()
            reader = asyncio.create_task(_read(call))
            try:
                while sent < count and not reader.done():
                    await call.write(GatewayFrame(payload=mutated(draw)))
                    sent += 1
                    await asyncio.sleep(0)
                await call.done_writing()
                async with asyncio.timeout(STREAM_SECONDS):
                    await reader
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await reader
            finally:
                call.cancel()


async def _over_unix(url: str, draw: random.Random, count: int) -> None:
    sent = 0
    while sent < count:
        reader, writer = await asyncio.open_unix_connection(stream_path(url))
        reading = asyncio.create_task(reader.read())
        try:
            while sent < count and not reading.done():
                writer.write(_misframed(draw, framed(mutated(draw))))
                sent += 1
                await writer.drain()
                await asyncio.sleep(0)
            writer.write_eof()
            async with asyncio.timeout(STREAM_SECONDS):
                await reading
        except OSError:
            await asyncio.gather(reading, return_exceptions=True)
        finally:
            writer.close()


def _misframed(draw: random.Random, frame: bytes) -> bytes:
    """The frame, now and then with a length that is not its own: too long for any message, too short, or cut off."""
    match draw.randrange(40):
        case 0:
            return b"\xff\xff\xff\xff" + frame[4:]
        case 1:
            return bytes(4) + frame[4:]
        case 2:
            return frame[: draw.randrange(len(frame))]
    return frame


async def _read(call: Any) -> None:
    """Read answers until the worker ends the stream, well or not."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        return
