"""A worker's frames of any content cost its gateway no more than their bytes, and the worker its own stream only."""

import asyncio
import socket
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from echo_worker import ask, tokens
from floods import array, counted_bytes
from fronts import DESCRIPTION, Front, talking
from streams import generate
from tables import table
from waiting import until

from saccade.connectors.native.client import WorkerClient
from saccade.connectors.native.step_frames import MAX_FRAME_BYTES, SPARE
from saccade.errors import WorkerFailed
from saccade.protocol.engine_load import Load
from saccade.protocol.output import FinishReason, StepFrame, TokenDelta, TokenLogprob
from saccade.protocol.request import EngineRequest, GatewayCommand
from saccade.transport import arrivals, framing
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream
from saccade.transport.server import WorkerServer

FRAME_BYTES = 3 << 20
MOST_BYTES = 8 * FRAME_BYTES
"""The frame is copied when it is sent, received and taken, and its parts refer to it. Objects would take 60 MB."""


packed = msgspec.msgpack.encode


def delta(name: bytes, **parts: bytes) -> bytes:
    """A TokenDelta of the request *name*, whose later fields are *parts*."""
    fields = {"tokens": b"\x90", "reason": b"\xc0", "cached": b"\0", "failure": b"\xc0", "index": b"\0"}
    fields |= {"logprobs": b"\x90", "prompt_logprobs": b"\x90"} | parts
    return b"\x98" + bytes((0xA0 | len(name),)) + name + b"".join(fields.values())


LOAD = packed(Load(steps_by_tokens=(1,))).replace(b"\x91\1", array(b"\1", FRAME_BYTES))
ENTRY = b"\x92\0\1"

FRAMES = {
    "empty deltas": [b"\x91" + array(b"\x92\xa0\x90", FRAME_BYTES)],
    "empty deltas in a frame with many parts": [b"\xdc\0\x10" + array(b"\x92\xa0\x90", FRAME_BYTES) + b"\x90" * 15],
    "log probabilities": [b"\x91\x91" + delta(b"r", logprobs=array(ENTRY, FRAME_BYTES))],
    "log probabilities of the prompt": [b"\x91\x91" + delta(b"r", prompt_logprobs=array(ENTRY, FRAME_BYTES))],
    "top ids": [b"\x91\x91" + delta(b"r", logprobs=b"\x91\x93\0\1" + array(b"\x01", FRAME_BYTES))],
    "released names": [b"\x92\x90" + array(b"\xa3abc", FRAME_BYTES)],
    "questions": [b"\x94\x90\x90\xc0" + array(b"\x92\xa0\x90", FRAME_BYTES)],
    "a load with many counts": [b"\x93\x90\x90" + LOAD],
    "a frame that is too long": [bytes(5 << 20)],
    "deltas of nobody, in many frames": [b"\x91" + array(b"\x92\xa0\x90", 900)] * 9,
    "questions of nobody, in many frames": [b"\x94\x90\x90\xc0" + array(b"\x92\xa0\x90", 900)] * 9,
    "slots of nobody, in many frames": [b"\x92\x90" + array(b"\xa2ab", 900)] * 9,
}


class Flooding(Front):
    """A front that answers the first request with *frames*, and the later ones as it should."""

    def __init__(self, frames: list[bytes]) -> None:
        super().__init__()
        self.frames = frames

    def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
        if isinstance(command, EngineRequest):
            frames, self.frames = self.frames, []
            last = StepFrame([TokenDelta(command.request_id, [1], FinishReason.LENGTH)])
            for frame in (*frames, packed(last)):
                connection.send(frame)


def address(over: str, folder: Path) -> str:
    return f"unix:{folder}/w.sock" if over == "a Unix socket" else "127.0.0.1:0"


@table("name", FRAMES)
@table("over", ["a Unix socket", "TCP"])
async def test_a_frame_makes_no_more_objects_than_the_requests_explain(name: str, over: str, tmp_path: Path) -> None:
    front = Flooding(list(FRAMES[name]))
    async with talking(address(over, tmp_path), front) as client:
        with counted_bytes() as most_bytes:
            failed = asyncio.create_task(tokens(client, ask("r", [1])))
            await asyncio.wait([failed])
            assert most_bytes() < MOST_BYTES
        assert isinstance(failed.exception(), WorkerFailed)
        await until(lambda: client.ready)
        assert front.num_connections == 2
        assert await tokens(client, ask("again", [1])) == [1]


@pytest.mark.ci
@table("over", ["a Unix socket", "TCP"])
async def test_a_refused_frame_is_not_kept(over: str, tmp_path: Path) -> None:
    class Stubborn(Front):
        def open(self, frames: Frames | None = None) -> GatewayStream:
            stream = super().open(frames)
            if self.num_connections > 1:
                asyncio.get_running_loop().call_soon(stream.send, FRAMES["empty deltas"][0])
            else:
                asyncio.get_running_loop().call_soon(stream.end)
            return stream

    front = Stubborn()
    server = WorkerServer(front, address(over, tmp_path))
    await server.start()
    client = WorkerClient(server.address)
    try:
        with counted_bytes():  # the collector of cycles is off
            await client.start()
            await until(lambda: front.num_connections == 8)
            assert tracemalloc.get_traced_memory()[0] < 3 * FRAME_BYTES
    finally:
        await client.close()
        await server.stop()


def described(field: bytes, empty: bytes, value: bytes) -> bytes:
    return packed(DESCRIPTION).replace(field + empty, field + value)


MANY_FILES = b"".join(b"\xa5%05d\xc4\0" % number for number in range(1 << 16))
DESCRIPTIONS = {
    "aliases": described(b"\xa7aliases", b"\x90", array(b"\xa1x", FRAME_BYTES)),
    "reasons": described(b"\xafbackend_reasons", b"\x90", array(b"\xa1x", FRAME_BYTES)),
    "files": described(b"\xa5files", b"\x80", b"\xdf\0\1\0\0" + MANY_FILES),
    "a long name": described(b"\xa5model", b"\xa1m", b"\xdb\0\x10\0\0" + b"m" * (1 << 20)),
}


@table("name", DESCRIPTIONS)
async def test_a_description_makes_no_more_objects_than_a_model_has(name: str, tmp_path: Path) -> None:
    class Talkative(Front):
        num_described = 0
        description = DESCRIPTIONS[name]

        def describe(self, *, without_files: bool = False) -> bytes:
            self.num_described += 1
            return self.description

    front = Talkative()
    assert front.description != packed(DESCRIPTION)
    server = WorkerServer(front, f"unix:{tmp_path}/w.sock")
    await server.start()
    client = WorkerClient(server.address)
    with counted_bytes() as most_bytes:
        await client.start()
        await until(lambda: front.num_described == 2)
        assert most_bytes() < MOST_BYTES
    try:
        assert client.description is None
        front.description = packed(DESCRIPTION)
        await until(lambda: client.ready)
    finally:
        await client.close()
        await server.stop()


# --- honest workers ---


def logprobs(num_tokens: int, num_top: int) -> list[TokenLogprob]:
    return [TokenLogprob(-1.5, 70_000, list(range(70_000, 70_000 + num_top)), [-1.5] * num_top)] * num_tokens


@table("over", ["a Unix socket", "TCP"])
async def test_honest_frames_are_taken_whatever_their_size(over: str, tmp_path: Path) -> None:
    prompt, num_samples = list(range(15_000)), 128
    request = ask("r", prompt, *["slot"] * 500)
    sampling = msgspec.structs.replace(request.sampling, max_tokens=100, num_logprobs=20, num_prompt_logprobs=20)
    request = msgspec.structs.replace(request, sampling=sampling, num_samples=num_samples)
    deltas = [
        TokenDelta("r", [index], FinishReason.LENGTH, index=index, logprobs=logprobs(1, 21))
        for index in range(num_samples)
    ]
    deltas[0] = msgspec.structs.replace(deltas[0], prompt_logprobs=logprobs(len(prompt) - 1, 21))
    # A client that has left may have any delta on the way.
    left = [TokenDelta("left", list(range(5000)), logprobs=logprobs(10, 5))]
    frame = packed(StepFrame([*left, *deltas], ["slot"] * 500, Load(num_running=1)))
    assert len(frame) > MAX_FRAME_BYTES
    released: list[str] = []
    front = Flooding([packed(StepFrame(left)), frame])
    async with talking(address(over, tmp_path), front, released.extend) as client:
        arrived = [delta async for delta in generate(client, request)]
        assert (client.load, front.num_connections) == (Load(num_running=1), 1)
    assert arrived == deltas
    assert released == ["slot"] * 500


async def test_what_is_on_the_way_to_clients_that_left_is_no_fault(tmp_path: Path) -> None:
    """Each had as many tokens to come as it had asked for."""

    class Late(Front):
        def answer(self, connection: GatewayStream, command: GatewayCommand) -> None:
            if isinstance(command, EngineRequest):
                last = StepFrame([TokenDelta(command.request_id, [1], FinishReason.LENGTH)])
                for _ in range(20):
                    connection.send(packed(StepFrame([TokenDelta(f"left-{index}", [1]) for index in range(100)])))
                connection.send(packed(last))

    front = Front()
    async with talking(f"unix:{tmp_path}/w.sock", front) as client:
        for index in range(100):
            answer = generate(client, ask(f"left-{index}", [1]))
            beginning = asyncio.ensure_future(anext(answer))
            await asyncio.sleep(0)
            beginning.cancel()
            await asyncio.wait([beginning])
        front.answer = Late().answer  # type: ignore[method-assign]
        assert await tokens(client, ask("r", [1])) == [1]
        assert SPARE < 2000
        assert front.num_connections == 1


async def test_frames_of_one_read_are_taken_in_turns_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "TURN_SECONDS", -1.0)
    taken: list[bytes] = []
    seen: list[int] = []

    async def look() -> None:
        while len(taken) < 100:
            seen.append(len(taken))
            await asyncio.sleep(0)

    frames = Frames(taken.append, lambda: 100)
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"".join(framing.framed(b"%d" % number) for number in range(100)))
        await asyncio.get_running_loop().create_connection(lambda: frames, sock=ours)
        await look()
        theirs.close()
        await frames.ended()
    assert taken == [b"%d" % number for number in range(100)]
    assert set(range(1, 100)) <= set(seen)
