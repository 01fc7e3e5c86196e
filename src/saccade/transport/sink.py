"""The seam between a connector and the reader of its answer: the connector pushes deltas, and never waits."""

from collections.abc import Callable, Sequence
from typing import Protocol

from saccade.protocol.output import TokenDelta
from saccade.protocol.request import MediaPixels

SendPixels = Callable[[tuple[MediaPixels, ...]], None]


class Sink(Protocol):
    """Receives what a worker sends for one request, each call at once. A connector that closes fails its sinks.

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
