"""The prefill worker's end of transfers.

It listens, and sends a prompt's state to the decode worker that proves that it knows the transfer's key.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import secrets

import msgspec

from saccade.protocol.kv_transfer import (
    FromSource,
    KvForm,
    Piece,
    PieceAck,
    Prefilled,
    Pull,
    PullRefused,
    StateAck,
    Waiting,
)
from saccade.transport import lasting_task, shared_memory
from saccade.transport.kv_transfer.channel import (
    MAX_REPLY_BYTES,
    NAME_BYTES,
    NONCE_BYTES,
    SourceChannel,
    TransferFailed,
    name_of,
    source_channel,
)
from saccade.transport.kv_transfer.events import Delivered, PieceTaken, StateRequested, Tell, TransferEnded
from saccade.transport.kv_transfer.untaken import UntakenPieces

NAME_SECONDS = 2.0
"""The time in which a connection must name its transfer."""

HANDSHAKE_SECONDS = 10.0
"""The time in which the prefill leg of that transfer must arrive."""

MAX_CONNECTIONS = 1024
"""If there are more, one connection that has not named a transfer of this worker is closed.

It is the oldest of the address with the most such connections, so that one host does not shut out others. Decode
workers name a transfer at once.
"""

LOG_SECONDS = 60.0
"""Time between two lines about connections that named no transfer."""

SLOT_BYTES = 256 << 20
"""Shared memory for pieces on their way; if it is full, they go over the connection."""

NOT_TAKEN = "No decode worker received the prompt's state in time; send the request again."
BROKE_OFF = "The prefill worker could not go on with the transfer; send the request again."

logger = logging.getLogger(__name__)


class _Offer:
    """One transfer: its messages, its untaken pieces, and its connection."""

    def __init__(self, key: bytes, untaken: UntakenPieces) -> None:
        self.key = key
        self.messages: asyncio.Queue[tuple[FromSource, bytes]] = asyncio.Queue()
        self.untaken = untaken
        self.is_pulled = False
        self.is_computed = False
        self.connection: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None


@dataclasses.dataclass(frozen=True)
class KvSourceConfig:
    """Settings of a KvSource. *form* must equal the other end's.

    A transfer that holds state fails if it makes no progress for *timeout_seconds*. After *heartbeat_seconds* without
    another message, the source sends Waiting.
    """

    form: KvForm
    timeout_seconds: float
    heartbeat_seconds: float


class KvSource:
    """A prefill worker's transfers. Every method runs in the transfers' event loop."""

    def __init__(self, config: KvSourceConfig, tell: Tell) -> None:
        self._config = config
        self._tell = tell
        self._slots = shared_memory.SlotPool(SLOT_BYTES)
        self._offers: dict[bytes, _Offer] = {}
        self._arrived = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # The addresses of connections that have not named a transfer of this worker, the oldest first.
        self._strangers: dict[asyncio.Task[None], str] = {}
        self._num_unnamed = 0
        self._log_after = 0.0

    @property
    def num_open(self) -> int:
        """The total number of transfers, connections and slots in use."""
        return len(self._offers) + len(self._connections) + self._slots.num_used

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and return the address. Raises OSError."""
        # Twice the limit is buffered for each connection, even before it has named a transfer.
        self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_REPLY_BYTES)
        address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return address

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for offer in list(self._offers.values()):
            self.withdraw(offer.key)
        await lasting_task.end(*self._connections)
        self._slots.close()

    def offer(self, key: bytes) -> None:
        """Let a decode worker with *key* connect."""
        self._offers[name_of(key)] = _Offer(key, UntakenPieces(self._slots))
        self._arrived.set()
        self._arrived = asyncio.Event()

    def begun(self, key: bytes) -> None:
        """Note that the engine holds the prompt's state. From now on the transfer must make progress."""
        if (offer := self._offers.get(name_of(key))) is not None:
            self._wait_anew(offer)

    def prefilled(self, key: bytes, message: Prefilled) -> None:
        if (offer := self._offers.get(name_of(key))) is not None:
            offer.is_computed = True
            self._wait_anew(offer)
            offer.messages.put_nowait((message, b""))

    def send_piece(self, key: bytes, piece: Piece, content: bytes) -> None:
        if (offer := self._offers.get(name_of(key))) is not None:
            offer.messages.put_nowait((piece, content))

    def withdraw(self, key: bytes) -> None:
        """End a transfer and close its connection. Does nothing for an unknown key."""
        offer = self._offers.pop(name_of(key), None)
        if offer is None:
            return
        if offer.deadline is not None:
            offer.deadline.cancel()
        if offer.connection is not None:
            offer.connection.cancel()
        offer.untaken.end_transfer()

    def _wait_anew(self, offer: _Offer) -> None:
        """Restart the transfer's timeout."""
        if offer.deadline is not None:
            offer.deadline.cancel()
        loop = asyncio.get_running_loop()
        failed = TransferFailed(NOT_TAKEN, by_peer=offer.is_computed)
        offer.deadline = loop.call_later(self._config.timeout_seconds, self._end, offer, failed)

    def _end(self, offer: _Offer, failed: TransferFailed | None) -> None:
        """End a transfer that *failed* or has delivered its state, and report that, unless it was withdrawn."""
        if self._offers.get(name_of(offer.key)) is offer:
            self.withdraw(offer.key)
            self._tell(
                Delivered(offer.key) if failed is None else TransferEnded(offer.key, str(failed), failed.by_peer)
            )

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        is_full = len(self._connections) >= MAX_CONNECTIONS
        if connection is None or (is_full and not self._strangers):
            writer.close()
            return
        if is_full:
            self._close_stranger()
        self._connections.add(connection)
        peer = writer.get_extra_info("peername")
        self._strangers[connection] = peer[0] if peer else ""
        try:
            # Python 3.11 would log a traceback for each connection that is cancelled.
            with contextlib.suppress(asyncio.CancelledError):
                await self._serve(reader, writer, connection)
        finally:
            self._connections.discard(connection)
            self._strangers.pop(connection, None)
            writer.close()

    def _close_stranger(self) -> None:
        [(busiest, _)] = collections.Counter(self._strangers.values()).most_common(1)
        oldest = next(connection for connection, address in self._strangers.items() if address == busiest)
        del self._strangers[oldest]
        oldest.cancel()
        self._note_unnamed()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: asyncio.Task[None]
    ) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                offer, channel, pull = await self._handshake(reader, writer)
        except (TimeoutError, TransferFailed, OSError, EOFError):
            self._note_unnamed()
            return
        self._strangers.pop(connection, None)
        offer.connection = connection
        failed: TransferFailed | None = TransferFailed(BROKE_OFF, by_peer=False)
        try:
            if refusal := _mismatch(self._config.form, pull.form):
                await channel.send_message(PullRefused(refusal))
                raise TransferFailed(refusal, by_peer=False)
            self._tell(StateRequested(offer.key, pull.first_block))
            await self._exchange(offer, channel, pull.shm_namespace == shared_memory.readers())
            failed = None
        except TransferFailed as error:
            failed = error
        finally:
            # Whatever ends the connection ends the transfer.
            offer.connection = None
            self._end(offer, failed)

    def _note_unnamed(self) -> None:
        """Count a connection that named no transfer; log the number of these at most once in LOG_SECONDS."""
        self._num_unnamed += 1
        now = asyncio.get_running_loop().time()
        if now >= self._log_after:
            self._log_after = now + LOG_SECONDS
            logger.warning("%d connections for a KV transfer named no transfer of this worker", self._num_unnamed)
            self._num_unnamed = 0

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[_Offer, SourceChannel, Pull]:
        """Return the transfer whose key the peer has proved to know, its channel, and the peer's request."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(nonce)
        async with asyncio.timeout(NAME_SECONDS):
            named = await reader.readexactly(NAME_BYTES + NONCE_BYTES)
        name, other = named[:NAME_BYTES], named[NAME_BYTES:]
        while name not in self._offers:
            # The gateway sends both legs at once, and this one may be late.
            await self._arrived.wait()
        offer = self._offers[name]
        channel = source_channel((reader, writer), offer.key, nonce + other)
        message, _ = await channel.receive()
        if not isinstance(message, Pull) or offer.is_pulled or self._offers.get(name) is not offer:
            raise TransferFailed("A transfer begins with one request for its state.")
        offer.is_pulled = True
        return offer, channel, message

    async def _exchange(self, offer: _Offer, channel: SourceChannel, by_slots: bool) -> None:
        """Send and receive until the state is delivered. Raises TransferFailed."""
        await lasting_task.until_one_ends(self._send(offer, channel, by_slots), self._receive(offer, channel))

    async def _send(self, offer: _Offer, channel: SourceChannel, by_slots: bool) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.heartbeat_seconds):
                    message, content = await offer.messages.get()
            except TimeoutError:
                message, content = Waiting(), b""
            if isinstance(message, Piece):
                slot = offer.untaken.add_piece(content, by_slots)
                if slot is not None:
                    message, content = msgspec.structs.replace(message, slot=slot), b""
            await channel.send_message(message, content)

    async def _receive(self, offer: _Offer, channel: SourceChannel) -> None:
        while True:
            message, _ = await channel.receive()
            match message:
                case PieceAck():
                    offer.untaken.take_piece()
                    self._wait_anew(offer)
                    self._tell(PieceTaken(offer.key))
                case StateAck():
                    return
                case _:
                    raise TransferFailed("The decode worker asked twice.")


def _mismatch(ours: KvForm, theirs: KvForm) -> str:
    """Return a sentence that says why the two workers cannot exchange state, or "" if they can."""
    for field in msgspec.structs.fields(KvForm):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here != there:
            values = ("other models or weights",) if field.name == "fingerprint" else (here, there)
            return f"The workers differ in {field.name}: {' and '.join(map(str, values))}. Start both alike."
    return ""
