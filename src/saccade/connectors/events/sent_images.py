"""Remembers what this gateway has sent to a worker, so that the worker's events about it can be read.

Engines such as TokenSpeed write a number derived from an image's hash, its pad, over the image's placeholders. Their
events carry these numbers as token ids. Only the sender of the image knows what a pad stands for.
"""

from collections.abc import Callable
from typing import NamedTuple

from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest

FIRST_PAD = 1_000_000
"""Pads begin here; the engines that write them refuse a vocabulary that reaches this far."""

MAX_IMAGES = 1 << 16
MAX_SALTS = 16
"""Every page of a worker's text has a key for each of these tenants, because its events do not name them."""

NO_TENANT = (b"",)
"""The salts of prompts without a tenant."""


class SentImage(NamedTuple):
    """An image as it was sent for the tenant of *salt*: its placeholder's id, and the lengths of its spans."""

    salt: bytes
    content_hash: bytes
    placeholder: int
    spans: tuple[int, ...]


AMBIGUOUS = SentImage(b"", b"", -1, ())
"""Stands for two images with the same pad."""


class SentImages:
    """The newest MAX_IMAGES images and MAX_SALTS salts that were sent. *pad* returns an image's pad.

    Without *pad*, no pad is known. This is for engines that derive pads from data that the gateway does not have.
    """

    def __init__(self, pad: Callable[[MediaItem, bytes], int] | None = None) -> None:
        self._pad = pad
        self._images: dict[int, SentImage] = {}
        self._salts: dict[bytes, None] = {}
        self.has_forgotten_salts = False

    @property
    def salts(self) -> tuple[bytes, ...]:
        """The salts of the tenants whose prompts were sent, or the empty salt if none was."""
        return tuple(self._salts) or NO_TENANT

    def add(self, request: EngineRequest) -> None:
        """Note what *request* sends; call it before the worker can report it."""
        self._salts.pop(request.salt, None)
        self._salts[request.salt] = None
        if len(self._salts) > MAX_SALTS:
            del self._salts[next(iter(self._salts))]
            self.has_forgotten_salts = True
        if self._pad is None:
            return
        for item in request.media:
            pad, image = self._pad(item, request.salt), _image(item, request)
            before = self._images.pop(pad, image)
            self._images[pad] = image if image == before else AMBIGUOUS
            if len(self._images) > MAX_IMAGES:
                del self._images[next(iter(self._images))]

    def image(self, pad: int) -> SentImage | None:
        """Return the image that *pad* stands for, or None if no such image was sent, or more than one."""
        image = self._images.get(pad)
        return None if image is AMBIGUOUS else image


def _image(item: MediaItem, request: EngineRequest) -> SentImage:
    ids = [request.token_ids[span.start : span.start + span.length] for span in item.spans]
    placeholders = set[int]().union(*ids)
    if len(placeholders) != 1:
        # A block key is made of the prompt's own ids; the pad stands for one of them.
        return AMBIGUOUS
    return SentImage(request.salt, item.content_hash, placeholders.pop(), tuple(map(len, ids)))
