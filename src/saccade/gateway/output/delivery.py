"""Turns a worker's deltas into bytes for the client."""

import time
from typing import Protocol

from saccade.gateway.output.answer import Answer
from saccade.gateway.output.choice import AnswerChunk
from saccade.protocol.output import TokenDelta
from saccade.telemetry import Metrics

SHORT_SECONDS = 0.001
"""Work on a delta that takes no longer is not worth a call: there is one for each token."""


class ChunkWriter(Protocol):
    """Writes one answer's chunks in the format of its API."""

    @property
    def num_kept_bytes(self) -> int:
        """Roughly how many bytes of the answer still wait to be written."""

    def take_chunk(self, chunk: AnswerChunk) -> bytes:
        """Return the events for *chunk*, if any."""


class Response(Protocol):
    """Sends bytes to a client."""

    def write_events(self, events: bytes, num_kept_bytes: int) -> bool:
        """Take *events*; the writer keeps *num_kept_bytes* more. Return whether more may follow at once."""

    async def flush(self) -> None:
        """Wait until more may follow."""


class Delivery:
    """Takes the deltas of *answer*, has *writer* write them, and passes the events to *response*."""

    def __init__(self, answer: Answer, writer: ChunkWriter, response: Response, metrics: Metrics) -> None:
        self.is_whole = answer.is_whole
        self._answer = answer
        self._writer = writer
        self._response = response
        self._metrics = metrics

    def take(self, delta: TokenDelta) -> bool:
        """Write the chunk for *delta*, unless its choice has already finished. Return whether more may follow at once.

        Raises what Answer.take_delta() raises.
        """
        start = time.perf_counter()
        chunk = self._answer.take_delta(delta)
        if chunk is None:
            return True
        self.is_whole = self._answer.is_whole
        num_before = self._writer.num_kept_bytes
        events = self._writer.take_chunk(chunk)
        may_follow = self._response.write_events(events, self._writer.num_kept_bytes - num_before)
        if time.perf_counter() - start > SHORT_SECONDS:
            self._metrics.note_pause("delta", start)
        return may_follow

    async def flush(self) -> None:
        """Wait until the next delta may follow."""
        await self._response.flush()
