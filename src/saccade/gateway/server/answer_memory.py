"""Counts a whole answer until its client has read it, and hands it to the connection in pieces.

A connection keeps, perhaps in a copy, what it cannot send. So the answer waits here instead, and no connection holds
more than a few pieces of it. Streams count their own memory (event_stream.py).
"""

import asyncio
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from saccade.gateway.json_parts import TURN_BYTES
from saccade.gateway.reservation import Reservation

PIECE_BYTES = 64 << 10
"""A longer answer is counted. The others fit into the kernel's buffer of a connection."""

IS_COUNTED = "saccade.is_counted"
"""Key of the ASGI scope, which is there if the endpoint counts its answer itself."""


class AnswerMemory:
    """Wraps the ASGI application *app*: each long answer takes its bytes from a reservation for its request.

    If there is no room, the call that would have sent the answer raises QueueFull or BodyTooLarge, and nothing is sent.
    """

    def __init__(self, app: ASGIApp, reservation_of: Callable[[Scope], Reservation]) -> None:
        self._app = app
        self._reservation_of = reservation_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head: Message | None = None
        num_turn_bytes = 0

        async def send_in_turns(message: Message) -> None:
            nonlocal num_turn_bytes
            await send(message)
            num_turn_bytes += len(message.get("body", b""))
            # A client that reads fast would get all of it at once.
            if num_turn_bytes >= TURN_BYTES:
                num_turn_bytes = 0
                await asyncio.sleep(0)

        async def send_counted(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                head = message
                return
            start, head = head, None
            body, has_more = message.get("body", b""), message.get("more_body", False)
            if len(body) <= PIECE_BYTES or scope["method"] == "HEAD":
                if start is not None:
                    await send(start)
                await send_in_turns(message)
                return
            with self._reservation_of(scope) as memory:
                if start is not None:
                    if not has_more and IS_COUNTED not in scope:
                        memory.claim(len(body))
                    await send(start)
                for piece, is_last in _pieces(body):
                    await send_in_turns(
                        {"type": "http.response.body", "body": piece, "more_body": has_more or not is_last}
                    )

        await self._app(scope, receive, send_counted)


def _pieces(body: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yield *body* in pieces, each with whether it is the last.

    Pieces are copies, since a view would keep all of *body*.
    """
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES], start + PIECE_BYTES >= len(body)
