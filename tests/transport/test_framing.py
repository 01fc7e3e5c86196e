"""Frames come out as they went in, however the stream is cut."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from itertools import pairwise

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from saccade.protocol.engine_ipc import EngineFailed, EngineMessage, EngineProgress, Shutdown
from saccade.transport.engine_channel import FrontChannel
from saccade.transport.framing import ChannelClosed, framed, take_payloads


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(0, 400), max_size=8))
def test_payloads_do_not_depend_on_where_the_stream_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(framed(payload) for payload in payloads)
    places = [0, *sorted(cuts), len(stream)]
    buffer, taken = bytearray(), []
    for start, end in pairwise(places):
        buffer += stream[start:end]
        taken += take_payloads(buffer, 40)
    assert taken == payloads
    assert not buffer


def test_frames_before_an_oversize_frame_are_read() -> None:
    payloads = take_payloads(bytearray(framed(b"four") + framed(b"fives")), 4)
    assert next(payloads) == b"four"
    with pytest.raises(ChannelClosed):
        next(payloads)


@pytest.mark.parametrize(
    ("external", "error"),
    [
        (b"\xc1", msgspec.DecodeError),
        (msgspec.msgpack.encode(EngineFailed("ab")).replace(b"ab", b"\xff\xfe"), UnicodeDecodeError),
    ],
    ids=["no message", "not text"],
)
async def test_nothing_is_taken_after_a_message_of_another_world(external: bytes, error: type[Exception]) -> None:
    taken: list[EngineMessage] = []
    channel = FrontChannel(taken.append)
    front, engine = socket.socketpair()
    with engine:
        await channel.open(front)
        message = EngineProgress("loading", 1, 2)
        sound = framed(msgspec.msgpack.encode(message))
        engine.sendall(sound + framed(external) + sound)
        async with asyncio.timeout(20):
            with pytest.raises(error):
                await channel.ended()
            channel.close()
    assert taken == [message]


@pytest.mark.parametrize("gone", ["before", "after"])
@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_writes_after_the_peer_has_gone_are_dropped(
    runner: Callable[[Coroutine[None, None, None]], None], gone: str
) -> None:
    async def send() -> None:
        channel = FrontChannel(lambda _: None)
        front, engine = socket.socketpair()
        if gone == "before":
            engine.close()
        await channel.open(front)
        engine.close()
        async with asyncio.timeout(20):
            await channel.ended()
        channel.send(Shutdown())
        channel.close()

    runner(send())
