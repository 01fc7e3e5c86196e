"""Transfers of KV state over real sockets and shared memory: what arrives, and what ends a transfer. [eng] 40"""

import asyncio
import itertools
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TypeVar

import msgspec
import pytest
from tables import table

from saccade.errors import PeerFailed, StartupError
from saccade.protocol.kv_transfer import FirstToken, KvForm, Piece, PieceAck, Prefilled, new_key
from saccade.transport import shared_memory
from saccade.transport.kv_transfer.channel import LENGTHS, NONCE_BYTES, name_of
from saccade.transport.kv_transfer.destination import KvDestination, KvDestinationConfig
from saccade.transport.kv_transfer.events import (
    Delivered,
    Event,
    PieceArrived,
    PieceTaken,
    PromptComputed,
    StateRequested,
    TransferEnded,
)
from saccade.transport.kv_transfer.service import KvTransfers, TransferConfig
from saccade.transport.kv_transfer.source import NOT_TAKEN, KvSource, KvSourceConfig

FORM = KvForm(bytes(32), "float32", "float32", 16, 1000, 77)
FIRST = Prefilled([FirstToken(5)], 3)
E = TypeVar("E", bound=Event)


class End:
    """One engine's end: collects what it is told."""

    def __init__(self, form: KvForm = FORM, bind: str | None = None, timeout_seconds: float = 20.0) -> None:
        self.transfers = KvTransfers(TransferConfig(form, bind, timeout_seconds))
        self.told: list[Event] = []

    def next(self, kind: type[E]) -> E:
        """Wait for the next event, which must be of this kind."""
        self.wait_for(lambda: bool(self.told))
        event = self.told.pop(0)
        assert isinstance(event, kind), event
        return event

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline, self.told
            time.sleep(0.002)
            self.told += self.transfers.events()

    def wait_until_closed(self) -> None:
        self.wait_for(lambda: self.transfers.num_open == 0)


@contextmanager
def ends(form: KvForm = FORM, timeout_seconds: float = 20.0) -> Iterator[tuple[End, End]]:
    """A prefill worker's end, and a decode worker's with *form*."""
    source, destination = End(bind="127.0.0.1:0", timeout_seconds=timeout_seconds), End(form)
    with closing(source.transfers), closing(destination.transfers):
        yield source, destination


def address(end: End) -> str:
    assert end.transfers.address is not None
    return end.transfers.address


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two ends see the same shared memory."""
    numbers = itertools.count()
    monkeypatch.setattr(shared_memory, "readers", lambda: f"host {next(numbers)}")


def transferred(source: End, destination: End) -> list[PieceArrived]:
    """Move three pieces, the last one of state."""
    key = new_key()
    destination.transfers.pull(key, address(source), 4)
    source.transfers.offer(key)
    assert source.next(StateRequested) == StateRequested(key, 4)
    source.transfers.prefilled(key, FIRST)
    assert destination.next(PromptComputed) == PromptComputed(key, FIRST)
    pieces = [(Piece(4, 7), os.urandom(3000)), (Piece(7, 8), os.urandom(1000)), (Piece(8, 8, True), os.urandom(77))]
    arrived = []
    for piece, content in pieces:
        source.transfers.send_piece(key, piece, content)
        arrived.append(destination.next(PieceArrived))
        assert arrived[-1].content == content
        assert msgspec.structs.replace(arrived[-1].piece, slot=None) == piece
        destination.transfers.taken(key)
        source.next(PieceTaken)
    destination.transfers.received(key)
    source.next(Delivered)
    source.wait_until_closed()
    destination.wait_until_closed()
    return arrived


def test_state_goes_through_shared_memory_on_one_host() -> None:
    before = _own_slots()
    with ends() as (source, destination):
        arrived = transferred(source, destination)
        assert all(one.piece.slot is not None for one in arrived)
        assert len({one.piece.slot.name for one in arrived if one.piece.slot}) == 1, "the slot is used again"
    assert _own_slots() == before


def _own_slots() -> set[str]:
    return {name for name in os.listdir(shared_memory.FOLDER) if name.startswith(f"saccade-{os.getpid()}-")}


@pytest.mark.usefixtures("two_hosts")
def test_state_goes_over_the_connection_between_hosts() -> None:
    with ends() as (source, destination):
        assert all(one.piece.slot is None for one in transferred(source, destination))


def test_many_transfers_at_once() -> None:
    with ends() as (source, destination):
        keys = [new_key() for _ in range(50)]
        for key in keys:
            source.transfers.offer(key)
            destination.transfers.pull(key, address(source), 0)
        assert {source.next(StateRequested).key for _ in keys} == set(keys)
        for key in keys:
            source.transfers.prefilled(key, FIRST)
        for _ in keys:
            destination.transfers.received(destination.next(PromptComputed).key)
        assert {source.next(Delivered).key for _ in keys} == set(keys)
        source.wait_until_closed()
        destination.wait_until_closed()


DIFFERENCES = {
    "fingerprint": b"\1" * 32,
    "dtype": "bfloat16",
    "kv_cache_dtype": "float8_e4m3fn",
    "block_size": 32,
    "block_nbytes": 1001,
    "state_nbytes": 0,
    "tensor_parallel_size": 2,
    "window_nbytes": 500,
}


@table("field", msgspec.structs.fields(KvForm))
def test_workers_that_differ_transfer_nothing(field: msgspec.structs.FieldInfo) -> None:
    form = msgspec.structs.replace(FORM, **{field.name: DIFFERENCES[field.name]})
    with ends(form) as (source, destination):
        key = new_key()
        source.transfers.offer(key)
        destination.transfers.pull(key, address(source), 0)
        for end in (source, destination):
            ended = end.next(TransferEnded)
            assert f"differ in {field.name}" in ended.reason
            assert not isinstance(ended.error, PeerFailed)
            end.wait_until_closed()
        assert not source.told


def test_without_the_key_there_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.transport.kv_transfer.source.HANDSHAKE_SECONDS", 0.3)
    with ends() as (source, destination):
        source.transfers.offer(key := new_key())
        destination.transfers.pull(other := new_key(), address(source), 0)
        assert destination.next(TransferEnded).key == other
        destination.wait_until_closed()
        # Whoever knows the transfer's name, which travels in the open, needs the key too.
        monkeypatch.setattr("saccade.transport.kv_transfer.destination.name_of", lambda _: _name(key))
        destination.transfers.pull(other, address(source), 0)
        assert destination.next(TransferEnded).key == other
        assert source.transfers.events() == []
        monkeypatch.undo()
        destination.transfers.pull(key, address(source), 0)
        assert source.next(StateRequested).key == key


def _name(key: bytes) -> bytes:
    from saccade.transport.kv_transfer.channel import name_of

    return name_of(key)


def test_a_transfer_is_pulled_once() -> None:
    with ends() as (source, destination):
        source.transfers.offer(key := new_key())
        destination.transfers.pull(key, address(source), 0)
        source.next(StateRequested)
        second = End()
        with closing(second.transfers):
            second.transfers.pull(key, address(source), 0)
            second.next(TransferEnded)
        source.transfers.prefilled(key, FIRST)
        destination.next(PromptComputed)


def test_unclaimed_prompt_times_out() -> None:
    with ends(timeout_seconds=0.2) as (source, _):
        source.transfers.offer(key := new_key())
        source.transfers.prefilled(key, FIRST)
        assert source.next(TransferEnded) == TransferEnded(key, NOT_TAKEN)
        source.wait_until_closed()


def test_state_without_a_complete_prompt_times_out() -> None:
    source = End(bind="127.0.0.1:0", timeout_seconds=0.2)
    with closing(source.transfers):
        source.transfers.offer(key := new_key())
        source.transfers.begun(key)
        assert source.next(TransferEnded) == TransferEnded(key, NOT_TAKEN, by_peer=False)


async def test_a_transfer_may_take_longer_than_its_timeout_if_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's clock stands, and is put forward between two pieces by less than the timeout of 60 s."""
    loop, now = asyncio.get_running_loop(), [1000.0]
    monkeypatch.setattr(loop, "time", lambda: now[0])
    told: asyncio.Queue[Event] = asyncio.Queue()
    source = KvSource(KvSourceConfig(FORM, 60, 15), told.put_nowait)
    arrived: asyncio.Queue[Event] = asyncio.Queue()
    destination = KvDestination(KvDestinationConfig(FORM, 1000, 1 << 20), arrived.put_nowait)
    host, port = await source.listen("127.0.0.1", 0)
    source.offer(key := new_key())
    destination.pull(key, f"{host}:{port}", 0)
    assert await told.get() == StateRequested(key, 0)
    source.prefilled(key, FIRST)
    assert await arrived.get() == PromptComputed(key, FIRST)
    for number in range(3):
        source.send_piece(key, Piece(number, number + 1), bytes(1000))
        assert isinstance(await arrived.get(), PieceArrived)
        now[0] += 50
        destination.reply(key, PieceAck())
        assert await told.get() == PieceTaken(key)
    now[0] += 61
    assert await told.get() == TransferEnded(key, NOT_TAKEN)
    await destination.close()
    await source.close()


def test_unacknowledged_state_times_out() -> None:
    with ends(timeout_seconds=0.3) as (source, destination):
        source.transfers.offer(key := new_key())
        destination.transfers.pull(key, address(source), 0)
        source.next(StateRequested)
        source.transfers.prefilled(key, FIRST)
        source.transfers.send_piece(key, Piece(0, 1), bytes(1000))
        assert source.next(TransferEnded) == TransferEnded(key, NOT_TAKEN)
        destination.next(PromptComputed)
        destination.next(PieceArrived)
        destination.next(TransferEnded)
        source.wait_until_closed()
        destination.wait_until_closed()


def test_a_long_prompt_is_waited_for() -> None:
    """The source's heartbeats keep a transfer alive whose timeout is over many times."""
    source, destination = End(bind="127.0.0.1:0", timeout_seconds=1.0), End(timeout_seconds=1.0)
    with closing(source.transfers), closing(destination.transfers):
        source.transfers.offer(key := new_key())
        destination.transfers.pull(key, address(source), 0)
        source.next(StateRequested)
        time.sleep(2.5)
        source.transfers.prefilled(key, FIRST)
        destination.next(PromptComputed)


def test_silent_source_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        destination = End(timeout_seconds=0.2)
        with closing(destination.transfers):
            destination.transfers.pull(new_key(), f"127.0.0.1:{server.getsockname()[1]}", 0)
            assert "silent" in destination.next(TransferEnded).reason
            destination.wait_until_closed()


@table(
    "source",
    ["127.0.0.1:1", "nowhere", "127.0.0.1:port", "127.0.0.1:" + "1" * 5000, "", "a" * 64 + ".b:1", "a\0b:1", "..:1"],
)
def test_unreachable_source_ends_the_transfer(source: str) -> None:
    destination = End()
    with closing(destination.transfers):
        destination.transfers.pull(new_key(), source, 0)
        ended = destination.next(TransferEnded)
        assert "cannot be reached" in ended.reason
        assert isinstance(ended.error, PeerFailed)
        destination.wait_until_closed()


def test_source_that_drops_packets_ends_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full answers no further connection, as a firewall that drops packets."""
    monkeypatch.setattr("saccade.transport.kv_transfer.destination.CONNECT_SECONDS", 0.2)
    destination = End()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, closing(destination.transfers):
        place = server.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(place)
        destination.transfers.pull(new_key(), f"127.0.0.1:{place[1]}", 0)
        assert "cannot be reached" in destination.next(TransferEnded).reason
        for filler in fillers:
            filler.close()


def test_cancelled_transfer_ends_at_the_other_end() -> None:
    with ends() as (source, destination):
        for stop, told in ((source.transfers.withdraw, destination), (destination.transfers.cancel, source)):
            key = new_key()
            source.transfers.offer(key)
            destination.transfers.pull(key, address(source), 0)
            source.next(StateRequested)
            stop(key)
            ended = told.next(TransferEnded)
            assert (ended.key, type(ended.error)) == (key, PeerFailed)
            source.wait_until_closed()
            destination.wait_until_closed()


def test_transfer_cancelled_at_once_ends_at_the_other_end() -> None:
    with ends() as (source, destination):
        key = new_key()
        source.transfers.offer(key)
        destination.transfers.pull(key, address(source), 0)
        destination.transfers.cancel(key)
        source.next(StateRequested)
        assert type(source.next(TransferEnded).error) is PeerFailed
        source.wait_until_closed()
        destination.wait_until_closed()


@pytest.mark.parametrize("hosts", [1, 2])
@table(("piece", "num_bytes"), [(Piece(0, 1), 999), (Piece(0, 2), 1000), (Piece(3, 3, True), 78)])
def test_pieces_of_wrong_size_end_the_transfer(
    piece: Piece, num_bytes: int, hosts: int, request: pytest.FixtureRequest
) -> None:
    if hosts == 2:
        request.getfixturevalue("two_hosts")
    with ends() as (source, destination):
        source.transfers.offer(key := new_key())
        destination.transfers.pull(key, address(source), 0)
        source.next(StateRequested)
        source.transfers.send_piece(key, piece, bytes(num_bytes))
        assert "wrong size" in destination.next(TransferEnded).reason
        source.next(TransferEnded)
        source.wait_until_closed()


@pytest.mark.usefixtures("two_hosts")
@pytest.mark.parametrize("spoiled", [0, 5, 40, 120, 700])
def test_a_damaged_byte_ends_the_transfer(spoiled: int) -> None:
    """Byte number *spoiled* behind the nonce, of what the source sends, is changed on its way."""
    with ends() as (source, destination), spoiling(address(source), 16 + spoiled) as by_way_of:
        source.transfers.offer(key := new_key())
        destination.transfers.pull(key, by_way_of, 0)
        source.next(StateRequested)
        source.transfers.prefilled(key, FIRST)
        source.transfers.send_piece(key, Piece(0, 1), bytes(1000))
        destination.wait_for(lambda: any(isinstance(event, TransferEnded) for event in destination.told))
        assert not any(isinstance(event, PieceArrived) for event in destination.told)
        source.next(TransferEnded)
        source.wait_until_closed()


@contextmanager
def spoiling(target: str, position: int) -> Iterator[str]:
    """The address of a proxy to *target* that changes one byte of what comes back."""
    host, port = target.split(":")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def relay() -> None:
            ours, _ = server.accept()
            with ours, socket.create_connection((host, int(port))) as theirs:
                back = threading.Thread(target=_copy, args=(ours, theirs, -1), daemon=True)
                back.start()
                _copy(theirs, ours, position)
                back.join(10)

        thread = threading.Thread(target=relay, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(10)


def _copy(source: socket.socket, target: socket.socket, position: int) -> None:
    passed = 0
    try:
        while data := bytearray(source.recv(1 << 16)):
            if passed <= position < passed + len(data):
                data[position - passed] ^= 1
            passed += len(data)
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_strangers_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.transport.kv_transfer.source.HANDSHAKE_SECONDS", 0.3)
    with ends() as (source, destination):
        host, port = address(source).split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(os.urandom(number * 37))
        transferred(source, destination)
        for stranger in strangers:
            stranger.close()


def test_silent_connections_do_not_shut_out_a_decode_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("saccade.transport.kv_transfer.source.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("saccade.transport.kv_transfer.source.NAME_SECONDS", 0.2)
    with ends() as (source, destination):
        host, port = address(source).split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(30)]
        source.transfers.offer(key := new_key())
        destination.transfers.pull(key, address(source), 0)
        source.next(StateRequested)
        for one in silent:
            one.settimeout(20)
            with suppress(ConnectionError):
                while one.recv(64):
                    pass
            one.close()
        source.transfers.withdraw(key)
        source.wait_until_closed()
    (line,) = caplog.records
    assert "named no transfer" in line.getMessage()


def test_silent_connections_of_one_address_do_not_push_out_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.transport.kv_transfer.source.MAX_CONNECTIONS", 8)
    monkeypatch.setattr("saccade.transport.kv_transfer.source.NAME_SECONDS", 60.0)
    with ends() as (source, _), ExitStack() as opened:
        host, port = address(source).split(":")

        def connect(own: str) -> socket.socket:
            return opened.enter_context(socket.create_connection((host, int(port)), 20, source_address=(own, 0)))

        other = connect("127.0.0.2")
        assert other.recv(NONCE_BYTES)
        silent = [connect("127.0.0.1") for _ in range(30)]
        for one in silent[:22]:
            with suppress(ConnectionError):
                while one.recv(64):
                    pass
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)


def test_a_stranger_cannot_have_a_large_message_read(caplog: pytest.LogCaptureFixture) -> None:
    with ends() as (source, _):
        host, port = address(source).split(":")
        source.transfers.offer(key := new_key())
        with socket.create_connection((host, int(port))) as stranger:
            stranger.settimeout(20)
            stranger.recv(NONCE_BYTES)
            stranger.sendall(name_of(key) + bytes(NONCE_BYTES) + LENGTHS.pack((64 << 10) + 1, 0))
            assert stranger.recv(1) == b""
        source.transfers.withdraw(key)
        source.wait_until_closed()


def test_messages_of_strangers_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.transport.kv_transfer.source.HANDSHAKE_SECONDS", 1.0)
    content = bytes(64 << 20)
    with ends() as (source, _):
        host, port = address(source).split(":")
        tracemalloc.start()
        try:
            with socket.create_connection((host, int(port)), 20) as stranger, suppress(ConnectionError):
                stranger.sendall(content)
                stranger.recv(1)
            source.wait_until_closed()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 2 << 20


def test_address_that_cannot_be_listened_on_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartupError, match="--kv-transfer-bind"):
        End(bind=f"127.0.0.1:{taken.getsockname()[1]}")
    assert not [thread for thread in threading.enumerate() if thread.name == "kv transfers"]
