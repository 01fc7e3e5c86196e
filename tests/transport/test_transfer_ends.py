"""Whatever ends a transfer of KV state, nothing of it is left: no slot, no connection, no transfer. # B2, F25"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from tables import table
from waiting import until

from saccade.protocol.kv_transfer import FromDestination, KvForm, Piece, PieceAck, Pull, StateAck, new_key
from saccade.transport import shared_memory
from saccade.transport.kv_transfer.channel import NONCE_BYTES, DestinationChannel, destination_channel, name_of
from saccade.transport.kv_transfer.events import Delivered, Event, StateRequested, TransferEnded
from saccade.transport.kv_transfer.source import KvSource, KvSourceConfig

BLOCK_BYTES = 1 << 20
FORM = KvForm(bytes(32), "float32", "float32", 16, BLOCK_BYTES, 0)
SECONDS = 60.0
"""How long a transfer may stand still; the test puts the clock forward."""


@dataclass
class Transfer:
    """One transfer, begun. *told* has the events of the prefill worker, *channel* and *writer* are the decode worker's.

    The loop's clock is *late_by* its first number.
    """

    source: KvSource
    key: bytes
    told: list[Event]
    channel: DestinationChannel
    writer: asyncio.StreamWriter
    late_by: list[float]

    def queue(self, *blocks: int) -> None:
        """Have the prefill worker send pieces of one block."""
        for block in blocks:
            self.source.send_piece(self.key, Piece(block, block + 1), bytes(BLOCK_BYTES))

    def ends(self) -> list[Event]:
        return [event for event in self.told if isinstance(event, TransferEnded | Delivered)]


@asynccontextmanager
async def begun(late_by: list[float], same_host: bool) -> AsyncIterator[Transfer]:
    told: list[Event] = []
    source = KvSource(KvSourceConfig(FORM, SECONDS, 1000.0), told.append)
    host, port = await source.listen("127.0.0.1", 0)
    source.offer(key := new_key())
    reader, writer = await asyncio.open_connection(host, port)
    nonce = os.urandom(NONCE_BYTES)
    writer.write(name_of(key) + nonce)
    channel = destination_channel((reader, writer), key, await reader.readexactly(NONCE_BYTES) + nonce, BLOCK_BYTES)
    await channel.send_message(Pull(0, FORM, shared_memory.readers() if same_host else "another host"))
    await until(lambda: StateRequested(key, 0) in told)
    source.begun(key)
    try:
        yield Transfer(source, key, told, channel, writer, late_by)
    finally:
        writer.close()
        await source.close()


async def withdrawn(one: Transfer) -> None:
    one.source.withdraw(one.key)


async def at_its_deadline(one: Transfer) -> None:
    # The clock jumps, so that the deadline and pieces that come a little earlier belong to one turn of the loop.
    one.late_by[0] += SECONDS + 1
    await until(one.ends)


async def closed(one: Transfer) -> None:
    await one.source.close()


async def hung_up(one: Transfer) -> None:
    one.writer.close()
    await until(one.ends)


async def reset(one: Transfer) -> None:
    one.writer.transport.abort()
    await until(one.ends)


async def damaged(one: Transfer) -> None:
    one.writer.write(bytes(100))
    await until(one.ends)


def with_messages(*messages: FromDestination) -> Callable[[Transfer], Awaitable[None]]:
    async def end(one: Transfer) -> None:
        for message in messages:
            await one.channel.send_message(message)
        await until(one.ends)

    return end


async def nothing(one: Transfer) -> None:
    """No piece exists when the transfer ends."""


async def queued(one: Transfer) -> None:
    """A piece is queued in the very turn of the loop in which the transfer ends."""
    one.queue(0)


async def queued_at_the_deadline(one: Transfer) -> None:
    asyncio.get_running_loop().call_later(SECONDS - 1, one.queue, 0)


async def untaken(one: Transfer) -> None:
    """Two pieces have arrived and are not acknowledged, and one more is queued."""
    one.queue(0, 1)
    for _ in range(2):
        await one.channel.receive()
    one.queue(2)


async def taken(one: Transfer) -> None:
    """A piece was acknowledged, and another one is queued."""
    one.queue(0)
    await one.channel.receive()
    await one.channel.send_message(PieceAck())
    one.queue(1)


async def many(one: Transfer) -> None:
    """More is queued than the connection takes, unless it goes through shared memory."""
    one.queue(*range(20))
    await asyncio.sleep(0)


ENDS = {
    "withdrawn by the engine": withdrawn,
    "at its deadline": at_its_deadline,
    "with the worker": closed,
    "hung up by the decode worker": hung_up,
    "reset by the decode worker": reset,
    "by a damaged message": damaged,
    "by a second request": with_messages(Pull(0, FORM, "another host")),
    "by an acknowledgement too many": with_messages(*[PieceAck()] * 30),
    "delivered": with_messages(StateAck()),
}
PIECES = (nothing, queued, queued_at_the_deadline, untaken, taken, many)


@pytest.mark.ci
@table("pieces", PIECES, ids=[one.__name__ for one in PIECES])
@table("end", ENDS.values(), ids=ENDS)
@table("same_host", [True, False], ids=["through shared memory", "over the connection"])
async def test_no_slot_is_in_use_after_a_transfer(
    pieces: Callable[[Transfer], Awaitable[None]],
    end: Callable[[Transfer], Awaitable[None]],
    same_host: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, late_by = asyncio.get_running_loop(), [0.0]
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + late_by[0])
    async with begun(late_by, same_host) as one:
        await pieces(one)
        await end(one)
        await until(lambda: one.source.num_open == 0)
        assert len(one.ends()) == (end not in (withdrawn, closed))
