"""Reads request bodies within the budget of bytes; a body that is too long is refused before it is read."""

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from starlette.types import Receive, Scope

from saccade.errors import BodyTooLarge
from saccade.gateway.limits.admission import LARGE_BODY_BYTES
from saccade.gateway.request import COPIES, Limits, Request
from saccade.gateway.server.client_address import TrustedProxies
from saccade.gateway.server.connection import CONNECTION, Connection
from saccade.gateway.tenants.account import ACCOUNT, Account

STEP_BYTES = 1 << 20
"""A body reserves so much at first; one of unknown length, or one that paused, always reserves so much at a time."""

PAUSE_SECONDS = 0.5
"""A body that pauses for so long gives back what is reserved for bytes that have not arrived."""

BODILESS = ("GET", "HEAD")


class ClientDisconnected(Exception):
    """The client closed the connection before the request was whole."""


@dataclass(frozen=True)
class BodyReader:
    """Begins requests within *limits*, and reads their bodies, of at most *max_bytes*."""

    limits: Limits
    proxies: TrustedProxies
    max_bytes: int

    def begin(
        self, scope: Scope, account: Account | None = None, *, is_charged: bool = True
    ) -> AbstractContextManager[Request]:
        """Serve the request of *scope* in the block, for *account* or that of its key. Raises as Request.begin()."""
        account = account or scope[ACCOUNT]
        client = account.tenant.id or self.proxies.client_of(scope)
        return Request.begin(self.limits, account, client, is_charged=is_charged)

    async def read(self, scope: Scope, receive: Receive, request: Request) -> bytearray:
        """Return the body, for which the request's memory grows; LARGE_BODY_BYTES or less need no reservation.

        Raises BodyTooLarge, QueueFull and ClientDisconnected.
        """
        memory = request.memory
        announced = announced_bytes(scope)
        if announced is not None and announced > self.max_bytes:
            raise self._too_large()
        await self.limits.admission.start(announced)
        # Waiting for the first bytes must hold neither memory nor a turn that reads.
        piece, more = await self._next(receive)
        body = bytearray(piece)
        if more and announced is not None and announced > LARGE_BODY_BYTES:
            # A client that announces much and sends little must not hold memory that others need.
            await memory.grow(COPIES * min(announced, STEP_BYTES))
        async with self.limits.admission.reading(announced if more else 0) as turn:
            while more and len(body) <= self.max_bytes:
                try:
                    async with asyncio.timeout(PAUSE_SECONDS):
                        piece, more = await self._next(receive)
                except TimeoutError:
                    memory.keep(COPIES * (len(body) + STEP_BYTES))
                    announced = None
                    continue
                turn.keep()
                body += piece
                if len(body) > LARGE_BODY_BYTES and memory.num_bytes < COPIES * len(body):
                    num_held = memory.num_bytes // COPIES
                    num_ahead = (
                        min(STEP_BYTES, self.max_bytes - num_held) if announced is None else announced - num_held
                    )
                    await memory.grow(COPIES * num_ahead)
        if len(body) > self.max_bytes:
            raise self._too_large()
        return body

    async def _next(self, receive: Receive) -> tuple[bytes, bool]:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        return message.get("body", b""), message.get("more_body", False)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request's body is over the limit of {self.max_bytes} bytes.")


def announced_bytes(scope: Scope) -> int | None:
    """Return the body's length from the request's head: 0 for methods without body, None where it is not given."""
    if scope["method"] in BODILESS:
        return 0
    announced: bytes = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(announced) if announced.isdigit() else None


@contextlib.contextmanager
def while_connected(scope: Scope) -> Iterator[None]:
    """Answer in the block a request whose body has been read; it is cancelled when the client disconnects.

    Raises ClientDisconnected then.
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
