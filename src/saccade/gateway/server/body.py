"""Reads and decodes request bodies within the byte budget. A body that announces too many bytes is refused unread."""

import asyncio
import codecs
import contextlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Self

from starlette.types import Receive, Scope

from saccade.errors import BodyTooLarge
from saccade.gateway.admission import LARGE_BODY_BYTES
from saccade.gateway.config import ServerSettings
from saccade.gateway.request import COPIES, Limits, Request
from saccade.gateway.reservation import Reservation
from saccade.gateway.server.client_address import TrustedProxies
from saccade.gateway.server.connection import CONNECTION, Connection
from saccade.gateway.server.content_coding import OUTPUT_BYTES, EncodedBody, coding_of
from saccade.gateway.server.request_reader import MAX_LENGTH
from saccade.gateway.tenants.account import ACCOUNT, Account
from saccade.gateway.work_threads import WorkThreads
from saccade.whole_numbers import read_whole_number

STEP_BYTES = 1 << 20
"""A body's first reservation, and every further one if its length is unknown or it has paused."""

PAUSE_SECONDS = 0.5
"""A body that pauses this long gives up the reservation for bytes that have not arrived."""

BODILESS = ("GET", "HEAD")


class ClientDisconnected(Exception):
    """The client closed the connection before it had sent the whole request or got its answer."""


@dataclass(frozen=True)
class BodyReader:
    """Begins requests within *limits* and reads their bodies, at most *max_bytes* each."""

    limits: Limits
    threads: WorkThreads
    proxies: TrustedProxies
    max_bytes: int

    @classmethod
    def of_config(cls, config: ServerSettings, limits: Limits, threads: WorkThreads) -> Self:
        """Return the reader for *config*. Raises StartupError if a proxy's network is malformed."""
        max_bytes = min(config.max_body_bytes, config.max_request_memory_bytes // COPIES)
        return cls(limits, threads, TrustedProxies(config.trusted_proxies), max_bytes)

    def begin_request(
        self, scope: Scope, account: Account | None = None, *, is_charged: bool = True
    ) -> AbstractContextManager[Request]:
        """Begin the request in *scope*, for *account* or for the account of the request's key.

        The request ends with the block. Raises what Request.begin_request() raises.
        """
        account = account or scope[ACCOUNT]
        return Request.begin_request(self.limits, account, self._client(scope, account), is_charged=is_charged)

    def answer_memory(self, scope: Scope) -> Reservation:
        """Return an empty reservation for the answer to the request in *scope*."""
        return self.limits.memory.reservation(self._client(scope, scope[ACCOUNT]))

    async def read_body(self, scope: Scope, receive: Receive, request: Request) -> bytearray:
        """Return the decoded body, and reserve memory for it.

        A body of at most LARGE_BODY_BYTES needs no reservation unless it is encoded. Raises UnsupportedContentEncoding,
        InvalidValue, BodyTooLarge, QueueFull and ClientDisconnected.
        """
        memory = request.memory
        arrival = _Arrival(receive, scope["headers"], self.threads)
        length = content_length(scope)
        if length is not None and length > self.max_bytes:
            raise self._too_large()
        await self.limits.admission.start(length)
        if arrival.is_encoded:
            length = None  # nobody knows how many bytes it decodes to
        # A client that has not sent its first bytes holds neither memory nor a reading turn.
        body = bytearray(await arrival.next())
        if arrival.has_more and (arrival.is_encoded or (length is not None and length > LARGE_BODY_BYTES)):
            # A client that announces much and sends little must not hold memory that others need. A decoder takes
            # hundreds of KiB, however short its body is.
            await memory.grow(COPIES * min(STEP_BYTES, self.max_bytes if length is None else length))
        async with self.limits.admission.reading(length if arrival.has_more else 0) as turn:
            while arrival.has_more and arrival.num_bytes <= self.max_bytes:
                try:
                    piece = await arrival.next(PAUSE_SECONDS)
                except TimeoutError:
                    memory.keep(COPIES * (len(body) + STEP_BYTES))
                    length = None
                    continue
                turn.keep()
                body += piece
                if len(body) > LARGE_BODY_BYTES and memory.num_bytes < COPIES * len(body):
                    num_held = memory.num_bytes // COPIES
                    num_ahead = min(STEP_BYTES, self.max_bytes - num_held) if length is None else length - num_held
                    await memory.grow(COPIES * num_ahead)
        if arrival.num_bytes > self.max_bytes:
            raise self._too_large()
        if arrival.is_encoded:
            memory.keep(COPIES * len(body))
        return _without_mark(body)

    async def read_short(self, scope: Scope, receive: Receive, max_bytes: int) -> bytearray:
        """Return a decoded body of at most *max_bytes*, which is too short to need a reservation.

        Raises UnsupportedContentEncoding, InvalidValue, BodyTooLarge and ClientDisconnected.
        """
        arrival = _Arrival(receive, scope["headers"], self.threads)
        body = bytearray()
        while arrival.has_more and arrival.num_bytes <= max_bytes:
            body += await arrival.next()
        if arrival.num_bytes > max_bytes:
            raise BodyTooLarge(f"The body has more than {max_bytes} bytes.")
        return _without_mark(body)

    def _client(self, scope: Scope, account: Account) -> Hashable:
        """Return who shares fairly with others: the tenant, or the address if there are no API keys."""
        return account.tenant.id or self.proxies.client_of(scope)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request's body is over the limit of {self.max_bytes} bytes.")


class _Arrival:
    """Receives a body piece by piece, and decodes it if *headers* name an encoding.

    *num_bytes* is the body's size so far, encoded or decoded, whichever is larger.
    """

    def __init__(self, receive: Receive, headers: Sequence[tuple[bytes, bytes]], threads: WorkThreads) -> None:
        coding = coding_of(headers)
        self.is_encoded = coding is not None
        self.has_more = True
        self.num_bytes = 0
        self._receive = receive
        self._threads = threads
        self._encoded = None if coding is None else EncodedBody(coding)
        self._num_wire_bytes = 0
        self._num_body_bytes = 0
        self._is_coming = True

    async def next(self, pause_seconds: float | None = None) -> bytes:
        """Return the next piece, decoded. It may be empty.

        Raises TimeoutError if nothing arrives for *pause_seconds*, ClientDisconnected, and InvalidValue or
        UnsupportedContentEncoding if the piece cannot be decoded.
        """
        piece = b""
        if self._encoded is None or not self._encoded.has_more:
            async with asyncio.timeout(pause_seconds):
                message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            piece = message.get("body", b"")
            self.has_more = self._is_coming = message.get("more_body", False)
            self._num_wire_bytes += len(piece)
        if self._encoded is not None:
            piece = await self._decode(self._encoded, piece)
        self._num_body_bytes += len(piece)
        self.num_bytes = max(self._num_wire_bytes, self._num_body_bytes)
        return piece

    async def _decode(self, encoded: EncodedBody, piece: bytes) -> bytes:
        """Decode one more step of *encoded*; if it needs more input, feed it *piece* first."""
        if not encoded.has_more:
            encoded.feed(piece, not self._is_coming)
        # A step for a short body takes less time than a thread needs to begin.
        is_long = self._num_body_bytes > LARGE_BODY_BYTES
        output = await self._threads.run_work(is_long, OUTPUT_BYTES, encoded.decode)
        self.has_more = self._is_coming or encoded.has_more
        return output


def _without_mark(body: bytearray) -> bytearray:
    """Remove a byte order mark, which a JSON parser may ignore (RFC 8259, 8.1)."""
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    return body


def content_length(scope: Scope) -> int | None:
    """Return Content-Length: 0 for methods without a body, None if the header is missing or wrong."""
    if scope["method"] in BODILESS:
        return 0
    length: bytes = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return read_whole_number(length.strip(), MAX_LENGTH)


@contextlib.contextmanager
def while_connected(scope: Scope) -> Iterator[None]:
    """Cancel the block and raise ClientDisconnected when the client disconnects.

    The request's body must have been read.
    """
    connection: Connection = scope[CONNECTION]
    task = asyncio.current_task()
    has_left = False

    def leave() -> None:
        nonlocal has_left
        has_left = True
        if task is not None:
            task.cancel()

    connection.watch(leave)
    try:
        yield
    except asyncio.CancelledError:
        if not has_left or task is None or task.uncancel():
            raise
        raise ClientDisconnected from None
    finally:
        connection.watch(None)
