"""Limits what a server may send in addition to a body: interim answers, headers and the framing of chunks.

aiohttp limits single headers and their number. Without limits on the rest, a server that sends nothing but `100
Continue` could keep the event loop busy for seconds.
"""

import asyncio
from functools import partial
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

MAX_INTERIM_ANSWERS = 8
MAX_HEAD_BYTES = 1 << 16
"""Bound of all bytes before the body."""

MAX_FRAMING_BYTES = 1 << 19
"""Framing may have as many bytes as the body plus this number; received bytes that are not parsed yet count too."""

_PIECE_BYTES = 1 << 12


def limit_responses(connector: aiohttp.TCPConnector) -> None:
    """Apply the limits to all answers on *connector*'s connections, in the running event loop."""
    loop = asyncio.get_running_loop()
    connector._factory = partial(_LimitedResponse, loop=loop)  # type: ignore[assignment]  # there is no public setting


class _LimitedResponse(ResponseHandler):
    """aiohttp's protocol for one connection, with this module's limits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._begin()

    def _begin(self) -> None:
        self._num_interim = 0
        self._num_head_bytes = 0
        self._num_body_bytes = 0
        self._body: StreamReader | None = None
        self._is_in_head = True

    def set_response_params(self, **settings: Any) -> None:
        """Reset the counts for the next request's answer."""
        self._begin()
        super().set_response_params(**settings)

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Note the parsed head of an answer."""
        message, body = data
        if 100 <= message.code < 200 and message.code != 101:
            self._num_interim += 1
        else:
            self._is_in_head = False
            self._body = None if body is EMPTY_PAYLOAD else body
        super().feed_data(data, size)

    def data_received(self, data: bytes) -> None:
        """Parse *data* in small pieces, so that little is parsed beyond a limit."""
        if not data:
            super().data_received(data)
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            if self._is_in_head:
                self._num_head_bytes += len(piece)
            elif self._body is None or self._body.is_eof():
                self._leave()  # data without a request
                return
            else:
                self._num_body_bytes += len(piece)
            super().data_received(piece)
            if self.exception() is not None:
                return
            if self._is_too_much():
                self._give_up()
                return

    def _is_too_much(self) -> bool:
        if self._is_in_head:
            return self._num_head_bytes > MAX_HEAD_BYTES or self._num_interim > MAX_INTERIM_ANSWERS
        return self._body is not None and self._num_body_bytes > 2 * self._body.total_bytes + MAX_FRAMING_BYTES

    def _give_up(self) -> None:
        error = aiohttp.ClientPayloadError("The server sends more framing than body.")
        if self._body is not None:
            self._body.set_exception(error)
        self.set_exception(error)
        self._leave()

    def _leave(self) -> None:
        self.force_close()
        if self.transport is not None:
            self.transport.abort()
