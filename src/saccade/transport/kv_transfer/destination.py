"""The decode worker's end of transfers: for each, it connects to the prefill worker and receives the state."""

import asyncio
import dataclasses
import logging
import secrets
from functools import partial

from saccade.protocol.kv_transfer import (
    FromDestination,
    KvForm,
    Piece,
    Prefilled,
    Pull,
    PullRefused,
    StateAck,
    Waiting,
)
from saccade.transport import lasting_task, shared_memory
from saccade.transport.kv_transfer.channel import (
    BUFFER_BYTES,
    NONCE_BYTES,
    DestinationChannel,
    TransferFailed,
    destination_channel,
    name_of,
)
from saccade.transport.kv_transfer.events import PieceArrived, PromptComputed, Tell, TransferEnded
from saccade.whole_numbers import read_port

CONNECT_SECONDS = 5.0
"""After this time a prefill worker is unreachable: a packet that a firewall drops gets no answer."""

BROKE_OFF = "The decode worker could not go on with the transfer; send the request again."

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class KvDestinationConfig:
    """Settings of a KvDestination: *form* must equal the other end's, and *max_content_bytes* limits one piece.

    After *timeout_seconds* without a message, the source counts as gone.
    """

    form: KvForm
    timeout_seconds: float
    max_content_bytes: int


@dataclasses.dataclass
class _Transfer:
    """One transfer: its task, and the *replies* that the task sends.

    A transfer that *is_unwanted* ends as soon as it *is_requested*.
    """

    task: asyncio.Task[None]
    replies: asyncio.Queue[FromDestination] = dataclasses.field(default_factory=asyncio.Queue)
    is_requested: bool = False
    is_unwanted: bool = False


class KvDestination:
    """A decode worker's transfers, each in its own task. Every method runs in the transfers' event loop."""

    def __init__(self, config: KvDestinationConfig, tell: Tell) -> None:
        self._config = config
        self._tell = tell
        self._transfers: dict[bytes, _Transfer] = {}

    @property
    def num_open(self) -> int:
        return len(self._transfers)

    async def close(self) -> None:
        await lasting_task.end(*(transfer.task for transfer in self._transfers.values()))

    def pull(self, key: bytes, source: str, first_block: int) -> None:
        """Start to receive a prompt's state, from block *first_block* on, from the worker at *source*, host:port."""
        task = asyncio.create_task(self._run(key, source, first_block), name=f"KV transfer from {source}")
        self._transfers[key] = _Transfer(task)
        task.add_done_callback(partial(self._forget, key))

    def _forget(self, key: bytes, task: asyncio.Task[None]) -> None:
        """Forget a transfer. If an unforeseen error has ended it, report its end, since the engine waits for that."""
        del self._transfers[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a KV transfer met an unforeseen error", exc_info=error)
            self._tell(TransferEnded(key, BROKE_OFF, by_peer=False))

    def reply(self, key: bytes, message: FromDestination) -> None:
        """Tell the source that a piece is used, or the whole state is here. Does nothing if the transfer has ended."""
        if (transfer := self._transfers.get(key)) is not None:
            transfer.replies.put_nowait(message)

    def cancel(self, key: bytes) -> None:
        """Close a transfer's connection, but not before the request has been sent.

        The source would not notice the end of a connection that never requested a transfer.

        Does nothing for an unknown key.
        """
        if (transfer := self._transfers.get(key)) is None:
            return
        if transfer.is_requested:
            transfer.task.cancel()
        transfer.is_unwanted = True

    async def _run(self, key: bytes, source: str, first_block: int) -> None:
        try:
            async with asyncio.timeout(min(CONNECT_SECONDS, self._config.timeout_seconds)):
                streams = await _connect(source)
        except (OSError, TimeoutError, ValueError):  # ValueError: no host can have such a name
            self._tell(TransferEnded(key, f"The prefill worker at {source} cannot be reached."))
            return
        try:
            await self._transfer(key, streams, first_block)
        except TransferFailed as failed:
            self._tell(TransferEnded(key, str(failed), failed.by_peer))
        except TimeoutError:
            self._tell(TransferEnded(key, "The prefill worker has gone silent."))
        finally:
            streams[1].close()

    async def _transfer(
        self, key: bytes, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], first_block: int
    ) -> None:
        """Request the state, and receive it until the engine reports that it is complete."""
        async with asyncio.timeout(self._config.timeout_seconds):
            channel = await self._opened(key, streams)
            await channel.send_message(Pull(first_block, self._config.form, shared_memory.readers()))
        transfer = self._transfers[key]
        transfer.is_requested = True
        if transfer.is_unwanted:
            return
        await lasting_task.until_one_ends(self._reply(transfer.replies, channel), self._receive(key, channel))

    async def _opened(
        self, key: bytes, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> DestinationChannel:
        reader, writer = streams
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            other = await reader.readexactly(NONCE_BYTES)
            writer.write(name_of(key) + nonce)
        except (OSError, EOFError) as error:
            raise TransferFailed("The prefill worker refused the connection.") from error
        return destination_channel(streams, key, other + nonce, self._config.max_content_bytes)

    async def _reply(self, replies: asyncio.Queue[FromDestination], channel: DestinationChannel) -> None:
        """Send replies, and return after the last one."""
        while True:
            message = await replies.get()
            await channel.send_message(message)
            if isinstance(message, StateAck):
                return

    async def _receive(self, key: bytes, channel: DestinationChannel) -> None:
        while True:
            async with asyncio.timeout(self._config.timeout_seconds):
                message, content = await channel.receive()
            match message:
                case Prefilled():
                    self._tell(PromptComputed(key, message))
                case Piece():
                    self._tell(PieceArrived(key, message, self._content(message, content)))
                case PullRefused(reason):
                    raise TransferFailed(reason, by_peer=False)
                case Waiting():
                    pass

    def _content(self, piece: Piece, content: bytes) -> bytes:
        """Return the content of *piece*. Raises TransferFailed if it cannot be read or has the wrong size."""
        expected = self._config.form.piece_nbytes(piece)
        if piece.slot is not None:
            if piece.slot.nbytes != expected:
                raise TransferFailed("The prefill worker sent state of a wrong size.")
            try:
                content = shared_memory.read_slot(piece.slot)
            except shared_memory.SlotError as error:
                raise TransferFailed("A part of the state was lost in shared memory.", by_peer=False) from error
        if len(content) != expected:
            raise TransferFailed("The prefill worker sent state of a wrong size.")
        return content


async def _connect(source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = source.rpartition(":")
    if not host or read_port(port) is None:
        raise OSError
    return await asyncio.open_connection(host.strip("[]"), int(port), limit=BUFFER_BYTES)
