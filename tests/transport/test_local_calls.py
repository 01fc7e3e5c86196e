"""Calls over a private Unix socket: answers find their calls, and a process that is away raises one error."""

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from saccade.transport.framing import framed
from saccade.transport.local_calls import CallClient, CallServer, NotReached

SECONDS = 30.0


@asynccontextmanager
async def calling(path: Path) -> AsyncIterator[CallClient]:
    """A client of *path* that need not be connected yet."""
    client = CallClient(path)
    client.start()
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def answering(path: Path, answer: Callable[[bytes], bytes]) -> AsyncIterator[None]:
    """A server at *path*."""
    server = CallServer(path, answer)
    await server.start()
    try:
        yield
    finally:
        server.stop()


async def answered(client: CallClient, request: bytes) -> bytes:
    """The answer, once the client is connected."""
    found: list[bytes] = []

    async def has_answered() -> bool:
        try:
            found.append(await client.call(request, SECONDS))
        except NotReached:
            return False
        return True

    async with asyncio.timeout(SECONDS):
        while not await has_answered():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found[0]


async def test_every_call_gets_its_own_answer_and_only_the_owner_may_connect(tmp_path: Path) -> None:
    path = tmp_path / "calls.sock"
    async with answering(path, lambda request: request[::-1]), calling(path) as client:
        assert await answered(client, b"abc") == b"cba"
        requests = [bytes([number]) * number for number in range(100)]
        answers = await asyncio.gather(*(client.call(b"<" + one, SECONDS) for one in requests))
        assert answers == [one + b"<" for one in requests]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_absent_process_raises_and_a_new_one_is_found(tmp_path: Path) -> None:
    path = tmp_path / "calls.sock"
    async with calling(path) as client:
        with pytest.raises(NotReached):
            await client.call(b"", SECONDS)
        for name in (b"first", b"second"):  # the second finds the socket's path free, or left behind
            async with answering(path, lambda request, name=name: name + request):  # type: ignore[misc]
                assert await answered(client, b"!") == name + b"!"


async def test_a_call_that_is_not_answered_raises_in_time_and_when_the_stream_ends(tmp_path: Path) -> None:
    path = tmp_path / "calls.sock"
    received = asyncio.Event()

    async def be_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        received.set()
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(be_silent, str(path)), calling(path) as client:
        waiting = asyncio.create_task(answered(client, b"one"))
        await asyncio.wait_for(received.wait(), SECONDS)
        with pytest.raises(NotReached):
            await client.call(b"two", 0.01)
        assert not waiting.done()
        last = asyncio.create_task(client.call(b"three", SECONDS))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(NotReached):
            await last
        waiting.cancel()


async def test_a_call_that_cannot_be_decoded_ends_its_stream_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "calls.sock"

    def answer(request: bytes) -> bytes:
        return msgspec.msgpack.encode(msgspec.msgpack.decode(request, type=str).upper())

    async with answering(path, answer), calling(path) as client:
        assert await answered(client, msgspec.msgpack.encode("a")) == msgspec.msgpack.encode("A")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(framed(b"0000\xc1"))
            stranger.settimeout(SECONDS)
            assert await asyncio.to_thread(stranger.recv, 1) == b""
        assert await client.call(msgspec.msgpack.encode("b"), SECONDS) == msgspec.msgpack.encode("B")
