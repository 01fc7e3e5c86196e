"""Cache events as SMG's scheduler wires carry them (`SubscribeKvEvents`) to events in our keys.

The wire names blocks by the engine's own hashes and tells the token ids of each, so our keys can be computed: each
block's from its parent's. Blocks that are not known for certain are left out, and so is all that follows them: those
whose parent was not reported, those with a pad that stands for no picture that this gateway has sent, those of
adapters or of tenants of other gateways, and those that have left the device.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import grpc
from smg_grpc_proto.generated import common_pb2

from saccade.errors import WorkerUnavailable
from saccade.identity.blocks import MediaRun, block_key, root_key
from saccade.protocol.kv_events import BlockRemoved, BlockStored, KvEvent, KvEvents
from saccade.transport.dialects.sent_pictures import FIRST_PAD, SentPicture, SentPictures

DEVICE = (common_pb2.KV_CACHE_TIER_UNSPECIFIED, common_pb2.KV_CACHE_TIER_DEVICE)
LOCAL = (common_pb2.KV_CACHE_LOCALITY_UNSPECIFIED, common_pb2.KV_CACHE_LOCALITY_LOCAL)
SUBSCRIBE_SECONDS = 10.0
SEVERAL_CACHES = (
    "it has a KV cache for each of several data-parallel ranks, and its calls do not say which rank takes them"
)
EARLIER = "it stored blocks before the gateway listened, and does not tell which"
MAX_EVENTS = 1000
"""Of one message; a batch of more becomes several."""

MAX_PAGES = 1 << 23
"""A worker that tells of more is not followed: their chains would take more memory than routing is worth."""


class Chain(NamedTuple):
    """A prompt up to the end of a page.

    *keys* are those of its last whole block, the root's where not *has_block*, one for each salt that the prompt may
    have; *token_ids* and *runs* follow that block. *picture* is the one of which the first *shown* tokens have come and
    more must; None between pictures.
    """

    keys: tuple[tuple[bytes, bytes], ...]
    token_ids: tuple[int, ...] = ()
    runs: tuple[MediaRun, ...] = ()
    picture: SentPicture | None = None
    shown: int = 0
    has_block: bool = False


class Pages:
    """The pages that a worker holds, by its own hashes, in our keys: blocks of *block_size* tokens.

    A page has *page_size* tokens; a block is one page or several. *earlier* is why the worker may hold more, "" where
    it does not.
    """

    def __init__(self, fingerprint: bytes, page_size: int, block_size: int, sent: SentPictures) -> None:
        self._fingerprint = fingerprint
        self._page_size = page_size
        self._block_size = block_size
        self._sent = sent
        self._chains: dict[int, Chain] = {}
        self.earlier = ""

    def take(self, event: common_pb2.KvCacheEvent) -> Iterator[KvEvent]:
        """Yield what *event* means. Raises WorkerUnavailable where it cannot be followed."""
        match event.WhichOneof("data"):
            case "stored":
                yield from self._store(event.stored)
            case "removed" if event.removed.tier in DEVICE and not event.removed.cache_level:
                yield from self._remove(event.removed.block_hashes)
            case "cleared":
                yield from self._remove(list(self._chains))
                self.earlier = ""

    def _store(self, stored: common_pb2.KvBlocksStored) -> Iterator[KvEvent]:
        if stored.tier not in DEVICE or stored.locality not in LOCAL or stored.lora_name or stored.cache_salt:
            return
        chain = self._parent(stored)
        for page in stored.blocks:
            if len(page.token_ids) != self._page_size:
                raise WorkerUnavailable(
                    f"its events tell of pages of {len(page.token_ids)} tokens, but its pages have {self._page_size}"
                )
            if chain is not None:
                chain = None if page.cache_level or page.lora_id else _grown(chain, page.token_ids, self._sent)
            if chain is None:
                return
            whole = _closed(chain) if len(chain.token_ids) == self._block_size else chain
            if self._chains.get(page.block_hash, whole) != whole:
                # Other keys, for tenants that were not known then; or another page, of which one is meant from now on.
                yield from self._remove((page.block_hash,))
            if whole is not chain:
                for (_, parent), (_, key) in zip(chain.keys, whole.keys, strict=True):
                    yield BlockStored(key, parent, [], is_first=not chain.has_block)
            self._chains[page.block_hash] = chain = whole
        if len(self._chains) > MAX_PAGES:
            raise WorkerUnavailable(f"it holds more than {MAX_PAGES} pages of KV cache")

    def _parent(self, stored: common_pb2.KvBlocksStored) -> Chain | None:
        if stored.HasField("parent_block_hash"):
            return self._chains.get(stored.parent_block_hash)
        return Chain(tuple((salt, root_key(self._fingerprint, salt)) for salt in self._sent.salts))

    def _remove(self, hashes: Iterable[int]) -> Iterator[KvEvent]:
        for name in hashes:
            chain = self._chains.pop(name, None)
            if chain is not None and not chain.token_ids:
                yield from (BlockRemoved(key) for _, key in chain.keys)


def _closed(chain: Chain) -> Chain:
    """Return *chain* with its pending tokens as a block."""
    keys = tuple((salt, block_key(parent, chain.token_ids, 0, chain.runs)) for salt, parent in chain.keys)
    return chain._replace(keys=keys, token_ids=(), runs=(), has_block=True)


def _grown(chain: Chain, token_ids: Sequence[int], sent: SentPictures) -> Chain | None:
    """Return *chain* with a page of *token_ids*; None where it is not certain what the page shows."""
    grown = chain
    for pad, group in groupby(token_ids, lambda token_id: token_id if token_id >= FIRST_PAD else 0):
        tokens = tuple(group)
        found = _with_picture(grown, sent.picture(pad), len(tokens)) if pad else _with_text(grown, tokens)
        if found is None:
            return None
        grown = found
    return grown


def _with_text(chain: Chain, token_ids: tuple[int, ...]) -> Chain | None:
    if chain.picture is not None and _place(chain.picture, chain.shown)[0]:
        return None
    return chain._replace(token_ids=chain.token_ids + token_ids)


def _with_picture(chain: Chain, picture: SentPicture | None, num_tokens: int) -> Chain | None:
    """Return *chain* with *num_tokens* tokens of *picture*: of one showing, or of several in a row."""
    if picture is None or chain.picture not in (None, picture):
        return None
    keys = tuple(pair for pair in chain.keys if pair[0] == picture.salt)
    runs, start, shown = list(chain.runs), len(chain.token_ids), chain.shown
    stop = start + num_tokens
    while start < stop:
        before, left = _place(picture, shown)
        length = min(left, stop - start)
        if before and runs:
            runs[-1] = runs[-1]._replace(length=runs[-1].length + length)
        else:
            runs.append(MediaRun(start, length, picture.content_hash, shown))
        start += length
        shown = (shown + length) % sum(picture.spans)
    token_ids = chain.token_ids + (picture.placeholder,) * num_tokens
    grown = Chain(keys, token_ids, tuple(runs), picture if shown else None, shown, chain.has_block)
    return grown if keys else None


def _place(picture: SentPicture, shown: int) -> tuple[int, int]:
    """Return how many tokens of the span of a picture's token *shown* come before it, and how many from it on."""
    stop = 0
    for length in picture.spans:
        stop += length
        if shown < stop:
            break
    return shown - (stop - length), stop - shown


async def reason_for_none(stub: Any) -> str:
    """Return why the worker of *stub* publishes no events; "" where it does."""
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    try:
        await asyncio.wait_for(call.wait_for_connection(), SUBSCRIBE_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return "it publishes no cache events: start it with --kv-events-config"
        return f"it refused its feed of cache events: {error.code().name}"
    except TimeoutError:
        return f"it did not begin its feed of cache events within {SUBSCRIBE_SECONDS:.0f} s"
    finally:
        call.cancel()
    return ""


async def follow(stub: Any, pages: Pages) -> AsyncGenerator[KvEvents, None]:
    """Yield what the worker of *stub* tells from now on: an empty snapshot, then increments.

    The wire has no snapshot: what the worker stored before is not known, and neither is what follows it.
    Raises WorkerUnavailable where the feed ends, has a gap, or tells of several caches.
    """
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    last: int | None = None
    number = itertools.count(1)
    try:
        await call.wait_for_connection()
        yield KvEvents(0, [], snapshot=True)
        async for batch in call:
            if batch.load.load_only:
                continue
            _check(batch, last)
            if last is None and batch.sequence_number:
                pages.earlier = EARLIER
            last = batch.sequence_number
            events = itertools.chain.from_iterable(map(pages.take, batch.events))
            while some := list(itertools.islice(events, MAX_EVENTS)):
                yield KvEvents(next(number), some)
        raise WorkerUnavailable("The worker ended its feed of cache events.")
    except grpc.aio.AioRpcError as error:
        raise WorkerUnavailable(f"The worker's feed of cache events ended: {error.code().name}.") from error
    finally:
        call.cancel()


def _check(batch: common_pb2.KvEventBatch, last: int | None) -> None:
    """Raise WorkerUnavailable unless *batch* is of rank 0 and follows the batch numbered *last*."""
    if batch.dp_rank:
        raise WorkerUnavailable(SEVERAL_CACHES)
    if last is not None and batch.sequence_number != last + 1:
        raise WorkerUnavailable("The worker's feed of cache events has a gap.")
