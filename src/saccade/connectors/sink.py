"""The seam between a connector and the reader of its answer: the connector pushes deltas, and never waits."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from saccade.protocol.output import TokenDelta
from saccade.protocol.request import MediaPixels

SendPixels = Callable[[tuple[MediaPixels, ...]], None]


class Sink(Protocol):
    """Receives what a worker sends for one request, as it arrives. A connector that closes fails its sinks.

    An error that a method raises fails its request, and no other. Nothing after fail() counts.
    """

    def delta(self, delta: TokenDelta) -> None:
        """Take a delta; the last one of a sample has a finish reason."""

    def pixels_wanted(self, media: Sequence[int], worker: str, send: SendPixels) -> None:
        """Call *send* later with the pixels of *media*, by index: the *worker*, a url, does not hold these images.

        Their slots come back as those of the request do.
        """

    def fail(self, error: BaseException) -> None:
        """Take the error that ends the request."""


class Stream(Protocol):
    """A request that a worker answers."""

    def abort_sample(self, index: int) -> None:
        """Stop work on one sample, if the wire can say so; the other samples go on."""

    async def close(self) -> None:
        """Abort the request unless it has ended. Return when nothing of it runs in this process."""


class Legs:
    """The streams of a request's prefill leg and decode leg as one, and the sink of the decode leg."""

    def __init__(self, sink: Sink) -> None:
        self.streams: list[Stream] = []
        self.has_begun = False
        self.sink = sink

    def abort_sample(self, index: int) -> None:
        """Stop the decode worker's work on one sample."""
        self.streams[-1].abort_sample(index)

    async def close(self) -> None:
        """Abort the legs that have not ended."""
        streams, self.streams = self.streams, []
        async with contextlib.AsyncExitStack() as closing:
            for stream in reversed(streams):
                closing.push_async_callback(stream.close)

    def delta(self, delta: TokenDelta) -> None:
        """Pass *delta* to the sink."""
        self.has_begun = True
        self.sink.delta(delta)

    def pixels_wanted(self, media: Sequence[int], worker: str, send: SendPixels) -> None:
        """Pass either leg's request for pixels to the sink."""
        self.sink.pixels_wanted(media, worker, send)

    def fail(self, error: BaseException) -> None:
        """Fail the request with a leg's *error*."""
        self.sink.fail(error)


@dataclass(frozen=True)
class PrefillSink:
    """The sink of the prefill leg. It drops the leg's token; a leg's error ends the request if no delta has come."""

    legs: Legs

    def delta(self, delta: TokenDelta) -> None:
        """Drop *delta*."""

    def pixels_wanted(self, media: Sequence[int], worker: str, send: SendPixels) -> None:
        self.legs.pixels_wanted(media, worker, send)

    def fail(self, error: BaseException) -> None:
        if not self.legs.has_begun:
            self.legs.fail(error)
