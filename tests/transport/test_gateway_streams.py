"""Streams over a Unix socket as the worker serves them; what both ways have in common is in test_wire.py."""

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import msgspec
import pytest
from echo_worker import ask
from fronts import Front
from waiting import until

from saccade.errors import StartupError
from saccade.protocol.request import Abort
from saccade.transport import framing
from saccade.transport.access import Access
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream, Refused, UnixStreams
from saccade.transport.server import WorkerServer
from saccade.transport.wire import stream_path

ABORT = msgspec.msgpack.encode(Abort(request_id="r"))


class Listening(Front):
    """A front that remembers its connections, and takes none when *closed*."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False
        self.connections: list[GatewayStream] = []

    def open(self, frames: Frames | None = None) -> GatewayStream:
        if self.closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "The engine is starting.")
        self.connections.append(super().open(frames))
        return self.connections[-1]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


@contextlib.asynccontextmanager
async def taking(folder: Path) -> AsyncIterator[tuple[Listening, str]]:
    front, path = Listening(), f"{folder}/w.sock.stream"
    streams = UnixStreams(front, path)
    await streams.start()
    try:
        yield front, path
    finally:
        streams.stop()


async def read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "little"))


@contextlib.asynccontextmanager
async def gateway(path: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A gateway's end, whose stream has been taken."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        assert await read(reader) == b""
        yield reader, writer
    finally:
        writer.close()


async def test_frames_both_ways_and_the_end(tmp_path: Path) -> None:
    async with taking(tmp_path) as (front, path), gateway(path) as (reader, writer):
        writer.write(framing.framed(ABORT) * 2)
        await until(lambda: len(front.commands) == 2)
        for frame in (b"one", bytes(3 << 20), b"three"):
            front.connections[0].send(frame)
        assert [len(await read(reader)) for _ in range(3)] == [3, 3 << 20, 5]
        writer.write_eof()
        assert await reader.read() == b""
        await until(lambda: front.left == front.connections)


async def test_stream_that_no_engine_is_ready_for_is_closed(tmp_path: Path) -> None:
    async with taking(tmp_path) as (front, path):
        front.closed = True
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        writer.close()
        front.closed = False
        async with gateway(path):
            assert len(front.connections) == 1


@pytest.mark.parametrize("ending", [b"\xff\xff\xff\xff", framing.framed(ABORT)[:-1], b"\x01"])
async def test_frame_too_large_or_cut_off_ends_its_own_stream(tmp_path: Path, ending: bytes) -> None:
    async with taking(tmp_path) as (front, path), gateway(path) as (other_reader, _):
        async with gateway(path) as (reader, writer):
            writer.write(framing.framed(ABORT) + ending)
            if ending[0] != 0xFF:
                writer.write_eof()
            assert await reader.read() == b""
        await until(lambda: front.left == front.connections[1:])
        assert front.commands == [Abort(request_id="r")]
        front.connections[0].send(b"still here")
        assert await read(other_reader) == b"still here"


async def test_command_that_is_refused_ends_its_stream(tmp_path: Path) -> None:
    async with taking(tmp_path) as (front, path), gateway(path) as (reader, writer):

        def refuse(connection: GatewayStream, command: bytes) -> None:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "A frame is not a command.")

        front.receive = refuse  # type: ignore[method-assign]
        writer.write(framing.framed(b"nonsense"))
        assert await reader.read() == b""
        await until(lambda: front.left == front.connections)


async def test_gateway_that_does_not_read_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.transport.gateway_streams.MAX_UNSENT_BYTES", 1 << 20)
    async with taking(tmp_path) as (front, path), gateway(path) as (reader, _):
        async with gateway(path) as (silent, _):
            for _ in range(100):
                front.connections[1].send(bytes(1 << 16))
            await until(lambda: front.left == front.connections[1:])
            with contextlib.suppress(ConnectionResetError):
                assert len(await silent.read()) < 4 << 20
        front.connections[0].send(b"still here")
        assert await read(reader) == b"still here"


async def test_gateway_that_is_slow_gets_all_and_holds_up_no_other(tmp_path: Path) -> None:
    async with taking(tmp_path) as (front, path), gateway(path) as (slow, _), gateway(path) as (quick, _):
        sent = [bytes([number]) * (1 << 18) for number in range(32)]
        for frame in sent:
            front.connections[0].send(frame)
            front.connections[1].send(b"quick")
            assert await read(quick) == b"quick"
        assert [await read(slow) for _ in sent] == sent


async def test_socket_is_there_while_the_worker_is_and_only_the_owner_may_connect(tmp_path: Path) -> None:
    path = Path(str(stream_path(f"unix:{tmp_path}/w.sock")))
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as killed:
        killed.bind(str(path))  # what a worker leaves that could not clean up
    front = Front()
    server = WorkerServer(front, f"unix:{tmp_path}/w.sock")
    old_mask = os.umask(0)
    try:
        await server.start()
        assert os.umask(0) == 0  # as it was
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(tmp_path / "w.sock").st_mode) == 0o600
    async with gateway(str(path)) as (reader, _):
        await server.stop()
        assert await reader.read() == b""
    assert os.listdir(tmp_path) == []


def test_owner_root_and_allowed_users_are_admitted() -> None:
    access = Access(allowed_uids=(7,), own_uid=5)
    assert [uid for uid in range(9) if access.admits(uid)] == [0, 5, 7]


def connect_as(uid: int, path: str) -> str:
    """What a process of the user *uid* gets to read at *path*, or why it may not even connect."""
    program = (
        "import os, socket, sys; uid, path = int(sys.argv[1]), sys.argv[2]\n"
        "if uid != os.geteuid(): os.setgroups([]); os.setgid(uid); os.setuid(uid)\n"
        "client = socket.socket(socket.AF_UNIX); client.settimeout(30)\n"
        "try: client.connect(path); print(client.recv(9))\n"
        "except OSError as error: print(type(error).__name__)"
    )
    command = [sys.executable, "-c", program, str(uid), path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


STRANGER = 65_533 if os.geteuid() == 0 else os.geteuid()
"""The user that clients of these tests run as; only root can start processes of another one."""


@pytest.mark.parametrize("allowed", [False, True])
async def test_stream_is_for_users_that_are_admitted(
    open_folder: Path, caplog: pytest.LogCaptureFixture, allowed: bool
) -> None:
    front, path = Listening(), f"{open_folder}/w.sock.stream"
    access = Access(allowed_uids=(STRANGER,) if allowed else (), own_uid=STRANGER + 1)
    streams = UnixStreams(front, path, access)
    await streams.start()
    os.chmod(path, 0o666)  # what an operator might do: the worker still looks
    try:
        seen = [await asyncio.to_thread(connect_as, STRANGER, path) for _ in range(2)]
        if allowed:
            assert seen == [repr(framing.framed(b""))] * 2
        else:
            assert set(seen) <= {"b''", "ConnectionResetError"}
            assert caplog.text.count(f"uid {STRANGER} may not open a stream") == 1
        assert len(front.connections) == (2 if allowed else 0)
    finally:
        streams.stop()


@pytest.mark.parametrize("allowed", [False, True])
async def test_both_sockets_let_allowed_users_in_and_no_others(open_folder: Path, allowed: bool) -> None:
    """Where a test runs as root, clients are another user; elsewhere they are the owner, who is always let in."""
    front = Front()
    access = Access(allowed_uids=(STRANGER,) if allowed else (STRANGER + 7,))
    server = WorkerServer(front, f"unix:{open_folder}/w.sock", access)
    await server.start()
    refused = not allowed and os.geteuid() == 0
    try:
        for name in ("w.sock", "w.sock.stream"):
            path = f"{open_folder}/{name}"
            seen = await asyncio.to_thread(connect_as, STRANGER, path)
            assert (seen == "PermissionError") == refused, (name, seen)
            assert not stat.S_IMODE(os.stat(path).st_mode) & 0o007
    finally:
        await server.stop()


GATEWAY = """
import asyncio, os, sys
from saccade.connectors.native.client import WorkerClient

async def main(url):
    client = WorkerClient(url)
    await client.start()
    async with asyncio.timeout(30):
        while not client.ready:
            await asyncio.sleep(0.01)
    await client.close()
    print("ready")

uid = int(sys.argv[1])
if uid != os.geteuid():
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
asyncio.run(main(sys.argv[2]))
"""


async def test_gateway_of_an_allowed_user_is_served(open_folder: Path) -> None:
    front = Front()
    server = WorkerServer(front, f"unix:{open_folder}/w.sock", Access(allowed_uids=(STRANGER,)))
    await server.start()
    try:
        command = [sys.executable, "-c", GATEWAY, str(STRANGER), server.address]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        said, _ = await process.communicate()
        assert said == b"ready\n"
    finally:
        await server.stop()


async def test_path_that_cannot_be_had_is_an_operators_error(tmp_path: Path) -> None:
    (tmp_path / "w.sock.stream").mkdir()
    with pytest.raises(StartupError, match=r"w\.sock"):
        await WorkerServer(Front(), f"unix:{tmp_path}/w.sock").start()


async def test_request_travels_whole(tmp_path: Path) -> None:
    async with taking(tmp_path) as (front, path), gateway(path) as (_, writer):
        request = ask("r", list(range(100_000)), "slot")
        writer.write(framing.framed(msgspec.msgpack.encode(request)))
        await until(lambda: front.commands)
        assert front.commands == [request]
