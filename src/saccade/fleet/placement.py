"""Where a request goes: the worker that was chosen for it."""

from dataclasses import dataclass

from saccade.fleet.legs import Pair
from saccade.fleet.router import Booking
from saccade.fleet.worker import Worker
from saccade.protocol.request import MAX_NUM_SAMPLES


@dataclass(frozen=True)
class Placement:
    """The worker that a request for *model* goes to; *pixel_dtype* is the dtype in which it takes pixels.

    With a *pair*, *worker* is its prefill worker. *keeps_images*: the images are needed until the answer's end.
    *held_share* is the share of the prompt that the worker held, or None if unknown. It is expected to have the images
    with the content hashes *held_images*. *can_retry*: if the worker fails, another one may be tried. *takes_chat*: the
    worker gets the chat, which has the images, instead of token ids. *num_at_once* is how many samples of the request
    may run at a time, *priority* its priority in the worker's queue.
    """

    worker: Worker
    pixel_dtype: str
    booking: Booking | None = None
    pair: Pair | None = None
    model: str = ""
    held_share: float | None = None
    held_images: frozenset[bytes] = frozenset()
    can_retry: bool = False
    takes_chat: bool = False
    keeps_images: bool = False
    num_at_once: int = MAX_NUM_SAMPLES
    priority: int = 0

    @property
    def url(self) -> str:
        """The url of the worker, or both of the pair, for the log."""
        return (self.pair or self.worker).url

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The worker, or both of the pair."""
        return (self.worker,) if self.pair is None else self.pair.workers

    def needs_pixels(self, content_hash: bytes) -> bool:
        """Return whether the worker needs the pixels of an image."""
        return not (self.takes_chat or content_hash in self.held_images)

    @property
    def failed_worker(self) -> Worker:
        """The worker that did not answer."""
        return self.worker if self.pair is None else self.pair.failed_worker

    def first_token(self) -> None:
        """Record that the prompt is computed."""
        if self.booking is not None:
            self.booking.first_token()
        if self.pair is not None:
            self.pair.on_first_token()
