"""Reads request bodies within the budget of bytes; a body that is too long is refused before it is read."""

import asyncio

from starlette.types import Receive, Scope

from saccade.errors import BodyTooLarge
from saccade.gateway.limits.admission import LARGE_BODY_BYTES, Admission
from saccade.gateway.limits.byte_budget import Reservation

COPIES = 2
"""A body, and the strings that parsing makes of it, until the body is dropped."""

STEP_BYTES = 1 << 20
"""A body reserves so much at first; one of unknown length, or one that paused, always reserves so much at a time."""

PAUSE_SECONDS = 0.5
"""A body that pauses for so long gives back what is reserved for bytes that have not arrived."""

BODILESS = ("GET", "HEAD")


class ClientDisconnected(Exception):
    """The client closed the connection before the request was whole."""


class BodyReader:
    """Reads bodies of at most *max_bytes*."""

    def __init__(self, admission: Admission, max_bytes: int) -> None:
        self._admission = admission
        self._max_bytes = max_bytes

    async def read(self, scope: Scope, receive: Receive, memory: Reservation) -> bytearray:
        """Return the request's body, for which *memory* grows; one of LARGE_BODY_BYTES or less needs no reservation.

        Raises BodyTooLarge, QueueFull and ClientDisconnected.
        """
        announced = announced_bytes(scope)
        if announced is not None and announced > self._max_bytes:
            raise self._too_large()
        await self._admission.start(announced)
        # Waiting for the first bytes must hold neither memory nor a turn that reads.
        piece, more = await self._next(receive)
        body = bytearray(piece)
        if more and announced is not None and announced > LARGE_BODY_BYTES:
            # A client that announces much and sends little must not hold memory that others need.
            await memory.grow(COPIES * min(announced, STEP_BYTES))
        async with self._admission.reading(announced if more else 0) as turn:
            while more and len(body) <= self._max_bytes:
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
                        min(STEP_BYTES, self._max_bytes - num_held) if announced is None else announced - num_held
                    )
                    await memory.grow(COPIES * num_ahead)
        if len(body) > self._max_bytes:
            raise self._too_large()
        return body

    async def _next(self, receive: Receive) -> tuple[bytes, bool]:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        return message.get("body", b""), message.get("more_body", False)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request's body is over the limit of {self._max_bytes} bytes.")


def announced_bytes(scope: Scope) -> int | None:
    """Return the body's length from the request's head: 0 for methods without body, None where it is not given."""
    if scope["method"] in BODILESS:
        return 0
    announced: bytes = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(announced) if announced.isdigit() else None
