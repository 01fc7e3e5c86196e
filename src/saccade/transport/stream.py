"""The gateway's end of one stream to a worker: over gRPC, or, on one host, over a Unix socket beside gRPC's.

The frames are the same. gRPC's asyncio hands every message through threads of its own, each of which has to be woken:
half of what a step's way to the gateway costs (docs/decisions/010-unix-stream.md).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from saccade.transport.framing import ChannelClosed, Frames
from saccade.transport.proto.worker_pb2 import GatewayFrame
from saccade.transport.wire import MAX_MESSAGE_BYTES, TAKEN, stream_path


async def converse(
    url: str,
    stub: Any,
    commands: AsyncIterator[bytes],
    on_open: Callable[[], None],
    on_frame: Callable[[bytes], None],
) -> None:
    """Send *commands* to the worker at *url*, and hand on the StepFrames that come back, until it ends the stream.

    *on_open* is called once the worker has taken it, as its first, empty frame says. *stub* is the WorkerStub of a
    channel to *url*. Raises ChannelClosed or gRPC's error where the worker takes no stream or breaks it off, and the
    error of a frame that *on_frame* could not read.
    """

    def take(payload: bytes) -> None:
        if payload == TAKEN:
            on_open()
        else:
            on_frame(payload)

    path = stream_path(url)
    if path is None:
        await _over_grpc(stub, commands, take)
    else:
        await _over_unix(path, commands, take)


async def _over_grpc(stub: Any, commands: AsyncIterator[bytes], take: Callable[[bytes], None]) -> None:
    call = stub.Stream(GatewayFrame(payload=command) async for command in commands)
    try:
        async for frame in call:
            take(frame.payload)
    finally:
        call.cancel()


async def _over_unix(path: str, commands: AsyncIterator[bytes], take: Callable[[bytes], None]) -> None:
    loop = asyncio.get_running_loop()
    try:
        _, frames = await loop.create_unix_connection(lambda: Frames(take, MAX_MESSAGE_BYTES), path)
    except OSError as error:
        raise ChannelClosed from error
    sending = asyncio.create_task(_send(commands, frames), name=f"commands to {path}")
    try:
        await frames.ended()
    finally:
        sending.cancel()
        frames.close()


async def _send(commands: AsyncIterator[bytes], frames: Frames) -> None:
    async for command in commands:
        frames.send(command)
