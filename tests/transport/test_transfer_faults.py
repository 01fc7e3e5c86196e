"""Faults at each wait of a transfer of KV state: an engine is told of its end, and nothing of it is left. # B2, F25"""

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import injection
import pytest
from tables import table
from waiting import until

from saccade.protocol.kv_transfer import FirstToken, KvForm, Piece, PieceAck, Prefilled, StateAck, new_key
from saccade.transport import shared_memory
from saccade.transport.kv_transfer.destination import KvDestination, KvDestinationConfig
from saccade.transport.kv_transfer.events import Delivered, Event, PieceArrived, StateRequested, TransferEnded
from saccade.transport.kv_transfer.source import KvSource, KvSourceConfig

BLOCK_BYTES = 1000
FORM = KvForm(bytes(32), "float32", "float32", 16, BLOCK_BYTES, 0)
NUM_BLOCKS = 2
MAX_WAITS = 100
"""More than any transfer has."""


@dataclass
class Engines:
    """A prefill and a decode worker's transfers, and what their engines do with what they are told of *key*."""

    source: KvSource
    destination: KvDestination
    address: str = ""
    ended: list[str] = field(default_factory=list)
    content: bytes = b""

    def tell_prefill(self, event: Event) -> None:
        match event:
            case StateRequested(key, _):
                self.source.prefilled(key, Prefilled([FirstToken(5)]))
                for block in range(NUM_BLOCKS):
                    self.source.send_piece(key, Piece(block, block + 1), bytes([block]) * BLOCK_BYTES)
            case TransferEnded(key, _, _):
                self.ended.append("prefill failed")
                self.destination.cancel(key)
            case Delivered():
                self.ended.append("delivered")

    def tell_decode(self, event: Event) -> None:
        match event:
            case PieceArrived(key, piece, content):
                self.content += content
                self.destination.reply(key, PieceAck())
                if piece.stop == NUM_BLOCKS:
                    self.destination.reply(key, StateAck())
            case TransferEnded(key, _, _):
                self.ended.append("decode failed")
                self.source.withdraw(key)

    async def move(self, *faults: tuple[str, injection.Fault]) -> list[str]:
        """Move a prompt's state, with a fault in the tasks of one end. Return how it ended."""
        self.ended, self.content = [], b""
        key = new_key()
        self.source.offer(key)
        self.source.begun(key)
        with ExitStack() as followed:
            for end, fault in faults:
                if end == "decode":
                    followed.enter_context(injection.followed(fault))
            self.destination.pull(key, self.address, 0)
        await until(lambda: self.ended)
        # A gateway that one worker fails aborts the request at the other.
        self.source.withdraw(key)
        self.destination.cancel(key)
        await until(lambda: not self.source.num_open + self.destination.num_open)
        return self.ended


@asynccontextmanager
async def engines(*listening: injection.Fault) -> AsyncIterator[Engines]:
    """Both ends; faults of *listening* strike in connections to the prefill worker."""
    source = KvSource(KvSourceConfig(FORM, 60.0, 1000.0), lambda event: made.tell_prefill(event))
    destination = KvDestination(KvDestinationConfig(FORM, 60.0, BLOCK_BYTES), lambda event: made.tell_decode(event))
    made = Engines(source, destination)
    with ExitStack() as followed:
        for fault in listening:
            followed.enter_context(injection.followed(fault))
        host, port = await source.listen("127.0.0.1", 0)
    made.address = f"{host}:{port}"
    try:
        yield made
    finally:
        await destination.close()
        await source.close()


def fail(*_: object) -> BaseException:
    return RuntimeError("injected")


def expire(*_: object) -> BaseException:
    return TimeoutError()


@table("same_host", [True, False], ids=["through shared memory", "over the connection"])
@table("strike", [fail, expire], ids=["an error", "a deadline"])
@table("end", ["prefill", "decode"])
async def test_a_fault_at_each_wait_of_a_transfer(
    end: str, strike: Callable[..., BaseException], same_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(range(10_000))
    if not same_host:
        monkeypatch.setattr(shared_memory, "readers", lambda: f"host {next(hosts)}")
    for place in range(MAX_WAITS):
        fault = injection.Fault(place, strike)
        async with engines(*([fault] if end == "prefill" else [])) as both:
            ended = await both.move((end, fault))
            has_struck = fault.has_struck
            if not has_struck:
                assert ended == ["delivered"]
            if end == "decode":
                assert await both.move() == ["delivered"]
                assert both.content == b"".join(bytes([block]) * BLOCK_BYTES for block in range(NUM_BLOCKS))
        if not has_struck:
            break
    assert 2 < place < MAX_WAITS - 1
