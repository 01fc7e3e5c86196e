"""Runs an engine's transfers in a thread with its own event loop, so that they continue while a step computes."""

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from saccade.errors import StartupError
from saccade.protocol.kv_transfer import KvForm, Piece, PieceAck, Prefilled, StateAck
from saccade.transport import shared_memory
from saccade.transport.kv_transfer.destination import KvDestination, KvDestinationConfig
from saccade.transport.kv_transfer.events import Event
from saccade.transport.kv_transfer.source import KvSource, KvSourceConfig

MAX_PIECE_BYTES = 16 << 20
"""Bytes of the blocks in one piece, unless a single block is larger."""


@dataclasses.dataclass(frozen=True)
class TransferConfig:
    """Settings of KvTransfers. A prefill worker listens on *bind*, host:port; it is None for a decode worker.

    A transfer fails after *timeout_seconds* without progress at the source, or without a message at the destination.
    """

    form: KvForm
    bind: str | None
    timeout_seconds: float


class KvTransfers:
    """An engine's transfers by their keys. Call it from the engine's thread.

    Decode workers connect to a prefill worker's *address*; a decode worker's own is None. The file descriptor wake_fd
    is readable while events() has new events. Raises StartupError if it cannot listen on *bind*.
    """

    def __init__(self, config: TransferConfig) -> None:
        form, timeout = config.form, config.timeout_seconds
        shared_memory.sweep()
        self._events: deque[Event] = deque()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._source = KvSource(KvSourceConfig(form, timeout, timeout / 4), self._tell)
        largest = max(MAX_PIECE_BYTES, form.block_nbytes + form.window_nbytes, form.state_nbytes)
        self._destination = KvDestination(KvDestinationConfig(form, timeout, largest), self._tell)
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv transfers", daemon=True)
        self._thread.start()
        try:
            self.address = None if config.bind is None else self._listen(config.bind)
        except BaseException:
            self.close()
            raise

    @property
    def wake_fd(self) -> int:
        """A file descriptor that is readable while there are events."""
        return self._woken.fileno()

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    @property
    def num_open(self) -> int:
        """The total number of open transfers, connections and slots, for tests and metrics."""
        return self._source.num_open + self._destination.num_open

    def events(self) -> list[Event]:
        """Return the events since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        return [self._events.popleft() for _ in range(len(self._events))]

    def offer(self, key: bytes) -> None:
        """Let a decode worker that knows *key* ask for a prompt's state."""
        self._call(self._source.offer, key)

    def begun(self, key: bytes) -> None:
        """Note that the engine holds the prompt's state. From now on the transfer can time out."""
        self._call(self._source.begun, key)

    def prefilled(self, key: bytes, message: Prefilled) -> None:
        """Report to the decode worker that the prompt is computed, and restart the transfer's timeout."""
        self._call(self._source.prefilled, key, message)

    def send_piece(self, key: bytes, piece: Piece, content: bytes) -> None:
        """Send a part of the state. A PieceTaken event follows."""
        self._call(self._source.send_piece, key, piece, content)

    def withdraw(self, key: bytes) -> None:
        """End a transfer from this engine, without an event."""
        self._call(self._source.withdraw, key)

    def pull(self, key: bytes, source: str, first_block: int) -> None:
        """Ask the prefill worker at *source* for a prompt's state, starting at block *first_block*."""
        self._call(self._destination.pull, key, source, first_block)

    def taken(self, key: bytes) -> None:
        """Report to the prefill worker that a piece is used."""
        self._call(self._destination.reply, key, PieceAck())

    def received(self, key: bytes) -> None:
        """Report to the prefill worker that the whole state is here; this ends the transfer."""
        self._call(self._destination.reply, key, StateAck())

    def cancel(self, key: bytes) -> None:
        """End a transfer to this engine, without an event."""
        self._call(self._destination.cancel, key)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._woken.close()
        self._wake.close()

    async def _end(self) -> None:
        await self._source.close()
        await self._destination.close()

    def _listen(self, bind: str) -> str:
        host, _, port = bind.rpartition(":")
        try:
            listening = self._source.listen(host.strip("[]"), int(port))
            bound, number = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        except OSError as error:
            cause = os.strerror(error.errno) if error.errno is not None and error.errno > 0 else "no such host"
            raise StartupError(f"Cannot listen on {bind}: {cause}. Choose another --kv-transfer-bind.") from error
        return f"[{bound}]:{number}" if ":" in bound else f"{bound}:{number}"

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(method, *arguments)

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        # A full buffer means that the engine is awake already.
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"\0")
