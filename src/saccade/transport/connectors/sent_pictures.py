"""What this gateway has sent to a worker, so that the worker's events about it can be read.

Engines such as TokenSpeed write a number that they derive from a picture's hash, its pad, over the picture's
placeholders, and their events carry these numbers as token ids. Only who sent the picture knows what a pad stands for.
"""

from collections.abc import Callable
from typing import NamedTuple

from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest

FIRST_PAD = 1_000_000
"""Pads begin here; a vocabulary that reaches this far is refused by the engines that write them."""

MAX_PICTURES = 1 << 16
MAX_SALTS = 16
"""Every page of a worker's text is kept under the key of each of these tenants, because its events do not name them."""

NO_TENANT = (b"",)
"""The salts of prompts without a tenant."""


class SentPicture(NamedTuple):
    """A picture as it was sent for the tenant of *salt*: its placeholder's id, and the lengths of its spans."""

    salt: bytes
    content_hash: bytes
    placeholder: int
    spans: tuple[int, ...]


AMBIGUOUS = SentPicture(b"", b"", -1, ())
"""Stands for two pictures with the same pad."""


class SentPictures:
    """The newest MAX_PICTURES pictures and MAX_SALTS salts that were sent. *pad* returns a picture's pad.

    Without *pad* no pad is known: for engines that derive pads from what this gateway does not know.
    """

    def __init__(self, pad: Callable[[MediaItem, bytes], int] | None = None) -> None:
        self._pad = pad
        self._pictures: dict[int, SentPicture] = {}
        self._salts: dict[bytes, None] = {}
        self.has_forgotten_salts = False

    @property
    def salts(self) -> tuple[bytes, ...]:
        """The salts of the tenants whose prompts were sent; the empty one where none was."""
        return tuple(self._salts) or NO_TENANT

    def add(self, request: EngineRequest) -> None:
        """Note what *request* sends; call it before the worker can tell of it."""
        self._salts.pop(request.salt, None)
        self._salts[request.salt] = None
        if len(self._salts) > MAX_SALTS:
            del self._salts[next(iter(self._salts))]
            self.has_forgotten_salts = True
        if self._pad is None:
            return
        for item in request.media:
            pad, sent = self._pad(item, request.salt), _sent(item, request)
            before = self._pictures.pop(pad, sent)
            self._pictures[pad] = sent if sent == before else AMBIGUOUS
            if len(self._pictures) > MAX_PICTURES:
                del self._pictures[next(iter(self._pictures))]

    def picture(self, pad: int) -> SentPicture | None:
        """Return the picture that *pad* stands for; None where none was sent, or more than one."""
        found = self._pictures.get(pad)
        return None if found is AMBIGUOUS else found


def _sent(item: MediaItem, request: EngineRequest) -> SentPicture:
    ids = [request.token_ids[span.start : span.start + span.length] for span in item.spans]
    placeholders = set[int]().union(*ids)
    if len(placeholders) != 1:
        # A block key is made of the ids that the prompt has, and a pad tells of one.
        return AMBIGUOUS
    return SentPicture(request.salt, item.content_hash, placeholders.pop(), tuple(map(len, ids)))
