"""Streams that are lent: what the engine says goes past its front."""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from saccade.protocol.load import Load
from saccade.protocol.local import EngineMessage, EngineStep, Forward, Hangup, Reply
from saccade.transport.framing import ChannelClosed, framed, take_payloads
from saccade.transport.handover import Lender
from saccade.transport.local import EngineChannel
from saccade.transport.wire import TAKEN


class Ends:
    """An engine's channel, the front's end of it, and gateways."""

    def __init__(self) -> None:
        self.front, engine = socket.socketpair()
        self.lender = Lender(self.front)
        self.engine = EngineChannel(engine)
        self.front.settimeout(5)
        self.open = [self.front, engine]

    def lend(self, number: int) -> socket.socket:
        """Return the gateway's end of a stream that the engine has been lent."""
        gateway, ours = socket.socketpair()
        with ours:
            self.lender.lend(number, ours.fileno())
        gateway.settimeout(5)
        self.open.append(gateway)
        return gateway

    def tell(self, *messages: Any) -> None:
        self.front.sendall(b"".join(framed(msgspec.msgpack.encode(message)) for message in messages))

    def close(self) -> None:
        self.lender.close()
        self.engine._streams.close()
        for end in self.open:
            end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def frames(end: socket.socket, count: int) -> list[bytes]:
    buffer, taken = bytearray(), list[bytes]()
    while len(taken) < count:
        received = end.recv(1 << 20)
        assert received, f"the stream ended after {taken}"
        buffer += received
        taken += take_payloads(buffer, 1 << 30)
    assert not buffer
    return taken


def silent(end: socket.socket) -> bool:
    end.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        return not end.recv(1)
    end.settimeout(5)
    return True


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_frames_go_to_their_gateways_and_the_rest_to_the_front(ends: Ends) -> None:
    one, two = ends.lend(1), ends.lend(2)
    assert ends.engine.receive(0) == []
    ends.engine.step(EngineStep(5, [(1, b"for one"), (2, b"for two"), (3, b"over gRPC")]))
    ends.engine.step(EngineStep(6, [(1, b"more")]))
    ends.engine.step(EngineStep(7, [(2, b"more")], Load()))
    assert frames(one, 3) == [TAKEN, b"for one", b"more"]
    assert frames(two, 3) == [TAKEN, b"for two", b"more"]
    told = [msgspec.msgpack.decode(each, type=EngineMessage) for each in frames(ends.front, 2)]
    assert told == [EngineStep(5, [(3, b"over gRPC")]), EngineStep(7, [], Load())]
    assert silent(ends.front)


def test_what_the_front_says_keeps_its_place(ends: Ends) -> None:
    gateway = ends.lend(1)
    ends.engine.receive(0)
    ends.engine.step(EngineStep(1, [(1, b"first")]))
    ends.tell(Reply(1, b"second"), Forward(1, b"a command"), Reply(9, b"to nobody"))
    assert ends.engine.receive(1) == [Forward(1, b"a command")]
    ends.engine.step(EngineStep(2, [(1, b"third")]))
    assert frames(gateway, 4) == [TAKEN, b"first", b"second", b"third"]


def test_a_stream_that_was_hung_up_before_it_was_taken_is_let_go(ends: Ends) -> None:
    before = num_descriptors()
    gateway = ends.lend(1)
    ends.tell(Hangup(1))
    assert ends.engine.receive(1) == [Hangup(1)]
    assert frames(gateway, 1) == [TAKEN]
    assert gateway.recv(1) == b""
    assert num_descriptors() == before + 1  # the gateway's own


def test_who_is_behind_gets_all_and_holds_up_nobody(ends: Ends) -> None:
    slow, quick = ends.lend(1), ends.lend(2)
    ends.engine.receive(0)
    sent = [bytes([number]) * (1 << 18) for number in range(8)]
    for frame in sent:
        ends.engine.step(EngineStep(1, [(1, frame), (2, b"quick")]))
    assert frames(quick, 9) == [TAKEN] + [b"quick"] * 8
    buffer, taken = bytearray(), list[bytes]()
    while len(taken) < 9:
        ends.engine.receive(0)  # sends what there is room for
        buffer += slow.recv(1 << 20)
        taken += take_payloads(buffer, 1 << 30)
    assert taken == [TAKEN, *sent]
    assert ends.engine._streams.waiting() == []


def test_who_does_not_read_is_cut_off(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.transport.handover.MAX_UNSENT_BYTES", 1 << 20)
    behind, other = ends.lend(1), ends.lend(2)
    ends.engine.receive(0)
    for _ in range(10):
        ends.engine.step(EngineStep(1, [(1, bytes(1 << 18)), (2, b"still here")]))
    received = 0
    while data := behind.recv(1 << 20):
        received += len(data)
    assert received < 1 << 20
    assert frames(other, 11)[1:] == [b"still here"] * 10


def test_a_gateway_that_is_gone_harms_nobody(ends: Ends) -> None:
    gone, other = ends.lend(1), ends.lend(2)
    gone.close()
    ends.engine.receive(0)
    ends.engine.step(EngineStep(1, [(1, b"nobody's"), (2, b"still here")]))
    assert frames(other, 2) == [TAKEN, b"still here"]
    ends.tell(Hangup(1))
    assert ends.engine.receive(1) == [Hangup(1)]


def test_an_engine_without_a_front_ends() -> None:
    front, engine = socket.socketpair()
    front.close()
    with engine, pytest.raises(ChannelClosed):
        EngineChannel(engine)
    front, engine = socket.socketpair()
    lender = Lender(front)
    channel = EngineChannel(engine)
    front.close()
    lender.close()
    with engine, pytest.raises(ChannelClosed):
        channel.receive(5)
    channel._streams.close()
