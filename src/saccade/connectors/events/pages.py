"""Translates events about an engine's KV cache, which have the engine's own hashes and token ids, to our keys.

Our key for a block follows from its parent's key and its tokens. A page that is not known for certain is left out, with
everything after it. Such a page has an unknown parent, or a pad that stands for no image of this gateway.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from saccade.connectors.events.sent_images import FIRST_PAD, MAX_SALTS, SentImage, SentImages
from saccade.errors import WorkerUnavailable
from saccade.identity.blocks import MediaRun, block_key, root_key
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent

Hash = int | bytes
"""The engine's own name of a page."""

EXTRA_KEYS = "it holds blocks that depend on more than their tokens, such as another tenant's salt"
NOT_SENT = "it holds blocks after images that this gateway has not sent, or after blocks that it does not know"
TOO_MANY_TENANTS = f"its events do not name tenants, and more than {MAX_SALTS} have sent prompts to it"
LATE_TENANT = "its events do not name tenants, and it stored text before one of them sent a prompt to it"
MAX_PAGES = 1 << 23
"""A worker that reports more is not followed: their chains would take more memory than routing is worth."""


class Chain(NamedTuple):
    """A prompt up to the end of a page.

    *keys* are those of its last complete block, or the root's if not *has_block*: one for each salt that the prompt may
    have. *token_ids* and *runs* follow that block. *image* is the image whose first *num_shown* tokens have come and
    whose others must follow; None between images.
    """

    keys: tuple[tuple[bytes, bytes], ...]
    token_ids: tuple[int, ...] = ()
    runs: tuple[MediaRun, ...] = ()
    image: SentImage | None = None
    num_shown: int = 0
    has_block: bool = False


class Pages:
    """The pages that a worker holds, by its own hashes, in our keys: blocks of *block_size* tokens.

    A page has *page_size* tokens; a block is one page or several. *earlier* says why events before the first one are
    not known, or is "" if there were none.
    """

    def __init__(self, fingerprint: bytes, page_size: int, block_size: int, sent: SentImages) -> None:
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._block_size = block_size
        self._sent = sent
        self._chains: dict[Hash, Chain] = {}
        self._salts: frozenset[bytes] = frozenset()
        self._refused = ""
        self.earlier = ""

    @property
    def missing(self) -> str:
        """Why the worker may hold more than is known here; "" if it cannot."""
        if reason := self.earlier or self._refused:
            return reason
        if self._sent.has_forgotten_salts:
            return TOO_MANY_TENANTS
        # A page has the keys of the tenants known when it was stored; *_salts* are those since the oldest one.
        return LATE_TENANT if self._chains and not self._salts.issuperset(self._sent.salts) else ""

    def store(self, parent: Hash | None, pages: Iterable[tuple[Hash, Sequence[int]]]) -> Iterator[KvEvent]:
        """Yield our events for *pages*, each a name and token ids, that were stored in a row after *parent*.

        Raises WorkerUnavailable if the worker cannot be followed.
        """
        if not self._chains:
            self._salts = frozenset(self._sent.salts)
        chain = self._root() if parent is None else self._chains.get(parent)
        for name, token_ids in pages:
            if len(token_ids) != self._page_size:
                raise WorkerUnavailable(
                    f"its events report pages of {len(token_ids)} tokens, but its pages have {self._page_size}"
                )
            chain = None if chain is None else _grown(chain, token_ids, self._sent)
            if chain is None:
                self.refuse(NOT_SENT)
                return
            whole = _closed(chain) if len(chain.token_ids) == self._block_size else chain
            if self._chains.get(name, whole) != whole:
                # These are other keys, for tenants that were not known then, or another page, which replaces the old
                # one.
                yield from self.remove((name,))
            if whole is not chain:
                for (_, above), (_, key) in zip(chain.keys, whole.keys, strict=True):
                    yield BlockStored(key, above, [], is_first=not chain.has_block)
            self._chains[name] = chain = whole
        if len(self._chains) > MAX_PAGES:
            raise WorkerUnavailable(f"it holds more than {MAX_PAGES} pages of KV cache")

    def refuse(self, reason: str) -> None:
        """Note why some of the worker's pages are left out; the first reason stays until all pages leave."""
        self._refused = self._refused or reason

    def remove(self, names: Iterable[Hash]) -> Iterator[KvEvent]:
        """Yield our events for the removal of pages."""
        for name in names:
            chain = self._chains.pop(name, None)
            if chain is not None and not chain.token_ids:
                yield from (BlockRemoved(key) for _, key in chain.keys)

    def clear(self) -> Iterator[KvEvent]:
        """Yield our events for the removal of all pages."""
        yield from self.remove(list(self._chains))
        self.earlier = self._refused = ""

    def _root(self) -> Chain:
        return Chain(tuple((salt, root_key(self._fingerprint, salt)) for salt in self._sent.salts))


def _closed(chain: Chain) -> Chain:
    """Return *chain* with its pending tokens as a block."""
    keys = tuple((salt, block_key(parent, chain.token_ids, 0, chain.runs)) for salt, parent in chain.keys)
    return chain._replace(keys=keys, token_ids=(), runs=(), has_block=True)


def _grown(chain: Chain, token_ids: Sequence[int], sent: SentImages) -> Chain | None:
    """Return *chain* with a page of *token_ids*, or None if it is not certain what the page shows."""
    grown = chain
    for pad, group in groupby(token_ids, lambda token_id: token_id if token_id >= FIRST_PAD else 0):
        tokens = tuple(group)
        longer = _with_image(grown, sent.image(pad), len(tokens)) if pad else _with_text(grown, tokens)
        if longer is None:
            return None
        grown = longer
    return grown


def _with_text(chain: Chain, token_ids: tuple[int, ...]) -> Chain | None:
    if chain.image is not None and _place(chain.image, chain.num_shown)[0]:
        return None
    return chain._replace(token_ids=chain.token_ids + token_ids)


def _with_image(chain: Chain, image: SentImage | None, num_tokens: int) -> Chain | None:
    """Return *chain* with *num_tokens* tokens of *image*, shown once or several times in a row."""
    if image is None or chain.image not in (None, image):
        return None
    keys = tuple(pair for pair in chain.keys if pair[0] == image.salt)
    runs, start, num_shown = list(chain.runs), len(chain.token_ids), chain.num_shown
    stop = start + num_tokens
    while start < stop:
        before, left = _place(image, num_shown)
        length = min(left, stop - start)
        if before and runs:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + length)
        else:
            runs.append(MediaRun(start, length, image.content_hash, num_shown))
        start += length
        num_shown = (num_shown + length) % sum(image.spans)
    token_ids = chain.token_ids + (image.placeholder,) * num_tokens
    grown = Chain(keys, token_ids, tuple(runs), image if num_shown else None, num_shown, chain.has_block)
    return grown if keys else None


def _place(image: SentImage, num_shown: int) -> tuple[int, int]:
    """Return how many tokens of an image's current span were shown, and how many are left, after *num_shown* in all."""
    stop = 0
    for length in image.spans:
        stop += length
        if num_shown < stop:
            break
    return num_shown - (stop - length), stop - num_shown
