"""The engine's end of its channel to the front."""

import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from saccade.protocol.engine_ipc import EngineMessage, EngineStep, Forward, Hangup
from saccade.protocol.engine_load import Load
from saccade.transport.engine_channel import EngineChannel
from saccade.transport.framing import ChannelClosed, framed, take_payloads


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, EngineChannel]]:
    """The front's socket, and the engine's channel."""
    front, engine = socket.socketpair()
    with front, engine:
        yield front, EngineChannel(engine)


def test_all_that_has_arrived_is_received_in_order(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    assert channel.receive(0) == []
    messages = [Forward(1, bytes(1 << 16)), Forward(2, b"command"), Hangup(1)]
    stream = b"".join(framed(msgspec.msgpack.encode(message)) for message in messages)
    front.sendall(stream[:-3])
    assert channel.receive(5) == messages[:2]
    front.sendall(stream[-3:])
    assert channel.receive(5) == messages[2:]


def test_wait_ends_when_a_wake_descriptor_is_readable(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    woken, wake = socket.socketpair()
    with woken, wake:
        wake.send(b"0")
        began = time.monotonic()
        assert channel.receive(60, [woken.fileno()]) == []
        assert time.monotonic() - began < 30
        front.sendall(framed(msgspec.msgpack.encode(Hangup(1))))
        assert channel.receive(60, [woken.fileno()]) == [Hangup(1)]


def test_steps_reach_the_front_whole(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    steps = [EngineStep(5, [(1, b"one"), (2, b"two")]), EngineStep(6, [], Load())]
    for step in steps:
        channel.send(step)
    payloads = take_payloads(bytearray(front.recv(1 << 16)), 1 << 16)
    assert [msgspec.msgpack.decode(payload, type=EngineMessage) for payload in payloads] == steps


def test_engine_without_a_front_ends(ends: tuple[socket.socket, EngineChannel]) -> None:
    front, channel = ends
    front.close()
    with pytest.raises(ChannelClosed):
        channel.receive(5)
    with pytest.raises(ChannelClosed):
        channel.send(EngineStep(1, []))
