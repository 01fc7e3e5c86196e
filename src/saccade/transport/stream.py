"""The gateway's end of one stream to a worker: over gRPC, or, on one host, over a Unix socket beside gRPC's.

The frames are the same. gRPC's asyncio hands every message through threads of its own, each of which has to be woken:
half of what a step's way to the gateway costs (docs/decisions/010-unix-stream.md).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from saccade.transport.framing import ChannelClosed, Frames
from saccade.transport.proto.worker_pb2 import GatewayFrame
from saccade.transport.wire import MAX_MESSAGE_BYTES, stream_path


async def converse(
    url: str,
    stub: Any,
    commands: AsyncIterator[bytes],
    on_open: Callable[[], None],
    on_frame: Callable[[bytes], None],
) -> None:
    """Send *commands* to the worker at *url*, and hand on the StepFrames that come back, until it ends the stream.

    *on_open* is called once the worker has taken it. *stub* is the WorkerStub of a channel to *url*. Raises
    ChannelClosed or gRPC's error where the worker takes no stream or breaks it off, and the DecodeError of *on_frame*.
    """
    path = stream_path(url)
    if path is None:
        await _over_grpc(stub, commands, on_open, on_frame)
    else:
        await _over_unix(path, commands, on_open, on_frame)


async def _over_grpc(
    stub: Any, commands: AsyncIterator[bytes], on_open: Callable[[], None], on_frame: Callable[[bytes], None]
) -> None:
    call = stub.Stream(GatewayFrame(payload=command) async for command in commands)
    try:
        await call.wait_for_connection()
        on_open()
        async for frame in call:
            on_frame(frame.payload)
    finally:
        call.cancel()


async def _over_unix(
    path: str, commands: AsyncIterator[bytes], on_open: Callable[[], None], on_frame: Callable[[bytes], None]
) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def take(payload: bytes) -> None:
        # What comes behind a frame that could not be read would be an answer with a gap.
        if ended.done():
            return
        if not payload:
            on_open()
            return
        try:
            on_frame(payload)
        except msgspec.DecodeError as error:
            ended.set_exception(error)

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    try:
        _, frames = await loop.create_unix_connection(lambda: Frames(take, end, MAX_MESSAGE_BYTES), path)
    except OSError as error:
        raise ChannelClosed from error
    sending = asyncio.create_task(_send(commands, frames), name=f"commands to {path}")
    try:
        await ended
    finally:
        sending.cancel()
        frames.close()


async def _send(commands: AsyncIterator[bytes], frames: Frames) -> None:
    async for command in commands:
        frames.send(command)
