"""The feed of cache events and the questions for pixels, over a real wire, with a front that says what a test wants."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import grpc
import msgspec
import pytest
from echo_worker import ask
from fronts import Front, talking
from nested import NESTED_EVENTS
from streams import generate
from tables import table
from waiting import until

from saccade.connectors.native.feed import MAX_EVENTS
from saccade.errors import WorkerFailed, WorkerUnavailable
from saccade.protocol.kv_events import BlockStored, ImageRemoved, ImageStored, KvEvent, KvEvents
from saccade.protocol.media import SlotRef
from saccade.protocol.output import FinishReason, PixelsWanted, StepFrame, TokenDelta
from saccade.protocol.request import Abort, EngineRequest, GatewayCommand, MediaPixels, SupplyPixels
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import MAX_WAITING_FRAMES, GatewayStream, Refused
from saccade.transport.wire import MAX_REPLY_BYTES

A, B = (ImageStored(b"salt", name) for name in (b"a", b"b"))


class Curious(Front):
    """A front that holds nothing: it asks for the pixels of every request, and answers when they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.connection = GatewayStream(0)

    def open(self, frames: Frames | None = None) -> GatewayStream:
        self.connection = GatewayStream(0, frames)
        return self.connection

    def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
        match command:
            case EngineRequest(request_id=name):
                wanted = PixelsWanted(name, [0])
                connection.send(msgspec.msgpack.encode(StepFrame([], pixels_wanted=[wanted])))
            case SupplyPixels(request_id=name, media=media):
                released = [pixels.slot.name for pixels in media if pixels.slot is not None]
                delta = TokenDelta(name, [7], FinishReason.LENGTH)
                connection.send(msgspec.msgpack.encode(StepFrame([delta], released)))

    def say(self, number: int, *events: KvEvent, snapshot: bool = False, last: bool = True) -> None:
        """Send a message of the feed to the newest watcher."""
        self.watchers[-1].send(msgspec.msgpack.encode(KvEvents(number, list(events), snapshot, last)))


def by_hash(name: str) -> EngineRequest:
    """A request with one image, whose pixels it does not bring."""
    request = ask(name, [1], "slot")
    media = tuple(msgspec.structs.replace(item, slot=None) for item in request.media)
    return msgspec.structs.replace(request, media=media)


async def test_feed_is_read_in_order_with_blocks_if_they_are_wanted(tmp_path: Path) -> None:  # F5
    front = Curious()
    async with talking(f"unix:{tmp_path}/w.sock", front) as client:
        for blocks in (False, True):
            async with aclosing(client.kv_events(blocks=blocks)) as feed:
                first = asyncio.ensure_future(anext(feed))
                await until(lambda: front.watchers and front.watchers[-1] not in front.left)
                front.say(4, A, snapshot=True, last=False)
                front.say(4, snapshot=True)
                front.say(5, B)
                front.say(6, ImageRemoved(b"salt", b"a"))
                messages = [await first, *[await anext(feed) for _ in range(3)]]
            assert [message.events for message in messages] == [[A], [], [B], [ImageRemoved(b"salt", b"a")]]
            await until(lambda: front.watchers[-1] in front.left)
        assert front.watched == [(False, True), (True, True)]


@table(
    "fault",
    [
        "gap",
        "no snapshot",
        "second snapshot",
        "nonsense",
        "nested",
        "many events",
        "long message",
        "long name",
        "end",
        "refusal",
    ],
)
async def test_faulty_feed_is_left(tmp_path: Path, fault: str) -> None:
    front = Curious()
    async with talking(f"unix:{tmp_path}/w.sock", front) as client, aclosing(client.kv_events(blocks=True)) as feed:
        message = asyncio.ensure_future(anext(feed))
        await until(lambda: front.watchers)
        if fault != "no snapshot":
            front.say(1, A, snapshot=True)
            await message
            message = asyncio.ensure_future(anext(feed))
        if fault == "nonsense":
            front.watchers[-1].send(b"\xc1")
        elif fault == "nested":
            front.watchers[-1].send(NESTED_EVENTS)
        elif fault == "many events":
            front.say(2, *[B] * (MAX_EVENTS + 1))
        elif fault == "long message":
            front.say(2, BlockStored(b"key", b"root", [1 << 20] * (MAX_REPLY_BYTES["KvEvents"] // 5)))
        elif fault == "long name":
            front.say(2, ImageStored(b"salt", bytes(65)))
        elif fault == "end":
            front.watchers[-1].end()
        elif fault == "refusal":
            front.watchers[-1].end(Refused(grpc.StatusCode.UNAVAILABLE, "gone"))
        else:
            front.say(2 if fault == "no snapshot" else 3, B, snapshot=fault == "second snapshot")
        with pytest.raises(WorkerUnavailable):
            await message
        assert client.ready  # requests go on meanwhile


async def test_a_watcher_that_does_not_read_is_ended() -> None:
    watcher = GatewayStream(1)
    for _ in range(MAX_WAITING_FRAMES + 10):
        watcher.send(b"x")
    for _ in range(MAX_WAITING_FRAMES):
        assert await watcher.next() == b"x"
    with pytest.raises(Refused):
        await watcher.next()


async def test_pixels_are_brought_when_the_worker_asks(tmp_path: Path) -> None:  # F5
    front, released = Curious(), []

    async def supply(media: Sequence[int]) -> tuple[MediaPixels, ...]:
        return tuple(MediaPixels(index, SlotRef(name="s", generation=1, nbytes=48)) for index in media)

    async with talking(f"unix:{tmp_path}/w.sock", front, released.extend) as client:
        deltas = [delta async for delta in generate(client, by_hash("r"), supply)]
        assert [delta.token_ids for delta in deltas] == [[7]]
        assert [type(command) for command in front.commands] == [EngineRequest, SupplyPixels]
        assert released == ["s"]


async def test_without_pixels_the_request_fails_and_the_worker_forgets_it(tmp_path: Path) -> None:
    front = Curious()
    async with talking(f"unix:{tmp_path}/w.sock", front) as client:
        with pytest.raises(WorkerUnavailable, match="no pixels"):
            [delta async for delta in generate(client, by_hash("r"))]
        await until(lambda: len(front.commands) == 2)
        assert front.commands[1] == Abort(request_id="r")


async def test_pixels_for_a_worker_that_died_meanwhile_come_back(tmp_path: Path) -> None:
    front, released = Curious(), []

    async def supply(media: Sequence[int]) -> tuple[MediaPixels, ...]:
        front.connection.end(Refused(grpc.StatusCode.UNAVAILABLE, "The engine is gone."))
        await until(lambda: not client.ready or front.connection is not dying)
        return (MediaPixels(0, SlotRef(name="s", generation=1, nbytes=48)),)

    async with talking(f"unix:{tmp_path}/w.sock", front, released.extend) as client:
        dying = front.connection
        with pytest.raises(WorkerFailed):
            [delta async for delta in generate(client, by_hash("r"), supply)]
        assert released == ["s"]
