"""Remembers what this gateway has sent to a worker, so that the worker's events about it can be read.

Engines such as TokenSpeed write a number derived from an image's hash, its pad, over the image's placeholders. Their
events carry these numbers as token ids. Only the sender of the image knows what a pad stands for.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

from saccade.connectors.events.batches import ExtraKeys, Stored
from saccade.connectors.events.chain import Chain, Rest, SentImage
from saccade.identity.blocks import MediaRun
from saccade.protocol.exactness import EXACT, Exactness
from saccade.protocol.media import MediaItem
from saccade.protocol.request import EngineRequest

FIRST_PAD = 1_000_000
"""Pads begin here; the engines that write them refuse a vocabulary that reaches this far."""

MAX_IMAGES = 1 << 16
MAX_SALTS = 16
"""Every page of a worker's text has a key for each of these tenants, because its events do not name them."""

NO_TENANT = (b"",)
"""The salts of prompts without a tenant."""

EXTRA_KEYS = "it holds blocks that depend on more than their tokens, such as another tenant's salt"
NOT_SENT = "it holds blocks after images that this gateway has not sent, or after blocks that it does not know"
TOO_MANY_TENANTS = f"its events do not name tenants, and more than {MAX_SALTS} have sent prompts to it"
LATE_TENANT = "its events do not name tenants, and it stored text before one of them sent a prompt to it"

UNKNOWN = SentImage(b"", b"", -1, ())
"""Stands for an image that was not sent, and for two images with the same pad."""


class SentImages:
    """The newest MAX_IMAGES images and MAX_SALTS salts that were sent. *pad* returns an image's pad.

    Without *pad*, no pad is known. This is for engines that derive pads from data that the gateway does not have.
    Events do not name tenants, so a page of text may be that of each tenant.
    """

    without_parent = Exactness("DEGRADED", NOT_SENT)

    def __init__(self, pad: Callable[[MediaItem, bytes], int] | None = None) -> None:
        self._pad = pad
        self._images: dict[int, SentImage] = {}
        self._salts: dict[bytes, None] = {}
        self.has_forgotten_salts = False

    @property
    def salts(self) -> tuple[bytes, ...]:
        """The salts of the tenants whose prompts were sent, in order, or the empty salt if none was."""
        return tuple(sorted(self._salts)) or NO_TENANT

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
            self._images[pad] = image if image == before else UNKNOWN
            if len(self._images) > MAX_IMAGES:
                del self._images[next(iter(self._images))]

    def exactness(self, salts: tuple[bytes, ...] | None) -> Exactness:
        """Return DEGRADED if a page may be that of tenants that were not known when it was stored."""
        if self.has_forgotten_salts:
            return Exactness("DEGRADED", TOO_MANY_TENANTS)
        is_late = salts is not None and not set(salts).issuperset(self.salts)
        return Exactness("DEGRADED", LATE_TENANT) if is_late else EXACT

    def fault(self, event: Stored) -> Exactness | None:
        """Return a limit for pages that depend on more than their tokens, except on the salt of another gateway."""
        if any(event.extra_keys or ()):
            return Exactness("DEGRADED", EXTRA_KEYS)
        return EXACT if event.cache_salt else None

    def salts_of(self, extra_keys: ExtraKeys) -> tuple[bytes, ...]:
        """Return every tenant's salt."""
        return self.salts

    def grow(self, chain: Chain, token_ids: Sequence[int], extra_keys: ExtraKeys) -> Chain | Exactness:
        """Return *chain* with a page in its rest, or DEGRADED if it is not certain what the page shows."""
        if max(token_ids) < FIRST_PAD:
            return _with_text(chain, token_ids) or self.without_parent
        grown: Chain | None = chain
        for pad, group in groupby(token_ids, lambda token_id: token_id if token_id >= FIRST_PAD else 0):
            tokens = tuple(group)
            if grown is not None:
                image = self._images.get(pad, UNKNOWN)
                grown = _with_image(grown, image, len(tokens)) if pad else _with_text(grown, tokens)
        return grown or self.without_parent


def _image(item: MediaItem, request: EngineRequest) -> SentImage:
    ids = [request.token_ids[span.start : span.start + span.length] for span in item.spans]
    placeholders = set[int]().union(*ids)
    if len(placeholders) != 1:
        # A block key is made of the prompt's own ids; the pad stands for one of them.
        return UNKNOWN
    return SentImage(request.salt, item.content_hash, placeholders.pop(), tuple(map(len, ids)))


def _with_text(chain: Chain, token_ids: Sequence[int]) -> Chain | None:
    """Return *chain* with *token_ids* in its rest, or None if its image may not have text at this place."""
    before, runs, image, num_shown, has_block = chain.rest
    if image is not None and _place(image, num_shown)[0]:
        return None
    return Chain(chain.salts, chain.joined_keys, Rest((*before, *token_ids), runs, image, num_shown, has_block))


def _with_image(chain: Chain, image: SentImage, num_tokens: int) -> Chain | None:
    """Return *chain* with *num_tokens* tokens of *image*, shown once or several times in a row, or None if unknown."""
    token_ids, before, current, num_shown, has_block = chain.rest
    if image is UNKNOWN or current not in (None, image) or image.salt not in chain.salts:
        return None
    runs, start = list(before), len(token_ids)
    stop, num_image_tokens = start + num_tokens, sum(image.spans)
    while start < stop:
        num_before, num_left = _place(image, num_shown)
        length = min(num_left, stop - start)
        if num_before and runs:
            first, so_far, content_hash, offset = runs[-1]
            runs[-1] = MediaRun(first, so_far + length, content_hash, offset)
        else:
            runs.append(MediaRun(start, length, image.content_hash, num_shown))
        start += length
        num_shown = (num_shown + length) % num_image_tokens
    token_ids = (*token_ids, *(image.placeholder,) * num_tokens)
    salts = (image.salt,)
    rest = Rest(token_ids, tuple(runs), image if num_shown else None, num_shown, has_block)
    return Chain(salts, chain.keys_of(salts)[0], rest)


def _place(image: SentImage, num_shown: int) -> tuple[int, int]:
    """Return how many tokens of an image's current span were shown, and how many are left, after *num_shown* in all."""
    stop = 0
    for length in image.spans:
        stop += length
        if num_shown < stop:
            break
    return num_shown - (stop - length), stop - num_shown
