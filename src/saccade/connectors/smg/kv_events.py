"""Translates cache events of SMG's scheduler wires (`SubscribeKvEvents`) to events in our keys.

It leaves out pages of adapters, of other gateways' tenants and of tiers other than the device, as well as those that
pages.py leaves out.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from saccade.connectors.events.pages import EXTRA_KEYS, Pages
from saccade.errors import WorkerUnavailable
from saccade.protocol.kv_events import KvEvent, KvEvents

DEVICE = (common_pb2.KV_CACHE_TIER_UNSPECIFIED, common_pb2.KV_CACHE_TIER_DEVICE)
LOCAL = (common_pb2.KV_CACHE_LOCALITY_UNSPECIFIED, common_pb2.KV_CACHE_LOCALITY_LOCAL)
SUBSCRIBE_SECONDS = 10.0
SEVERAL_CACHES = "it has a KV cache for each of several data-parallel ranks"
EARLIER = "it stored blocks before the gateway listened, and does not report which"
SNAPSHOT_LACKS = "the snapshot of what it stored before has not arrived whole"
MAX_EVENTS = 1000
"""Events in one message; a larger batch becomes several messages."""

MAX_BATCH_EVENTS, MAX_BATCH_PAGES = 65_536, 1 << 20
"""A page has a token at least, and a step stores no more tokens than the longest prompts have."""


def taken(pages: Pages, event: common_pb2.KvCacheEvent) -> Iterator[KvEvent]:
    """Yield what *event* means for *pages*. Raises WorkerUnavailable if it cannot be followed."""
    match event.WhichOneof("data"):
        case "stored" if any(page.extra_keys for page in event.stored.blocks):
            pages.refuse(EXTRA_KEYS)
        case "stored" if _is_ours(event.stored):
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            yield from pages.store(parent, ((page.block_hash, page.token_ids) for page in event.stored.blocks))
        case "removed" if event.removed.tier in DEVICE and not event.removed.cache_level:
            yield from pages.remove(event.removed.block_hashes)
        case "cleared":
            yield from pages.clear()


def _is_ours(stored: common_pb2.KvBlocksStored) -> bool:
    """Return whether a request of ours could use the blocks: on the device, without adapter and salt."""
    if stored.tier not in DEVICE or stored.locality not in LOCAL or stored.lora_name or stored.cache_salt:
        return False
    return not any(page.cache_level or page.lora_id for page in stored.blocks)


async def reason_for_none(stub: Any) -> str:
    """Return why the worker of *stub* publishes no events, or "" if it does."""
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


async def follow(
    stub: Any, pages: Pages, rank: int | None, on_load: Callable[[common_pb2.EngineLoad], None]
) -> AsyncGenerator[KvEvents, None]:
    """Yield what the worker of *stub* reports from now on: an empty snapshot, then increments.

    Unless a relay sends a snapshot, what the worker stored before is not known, and neither is what follows it. If a
    relay merges several data-parallel ranks, only the batches of *rank* count. The load that comes with batches, or
    between them, goes to *on_load*. Raises WorkerUnavailable if the feed ends, has a gap, or reports several caches
    to a client without a rank.
    """
    call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    last: int | None = None
    number = itertools.count(1)
    try:
        await call.wait_for_connection()
        yield KvEvents(0, [], snapshot=True)
        async for batch in call:
            if rank is None and batch.dp_rank:
                raise WorkerUnavailable(SEVERAL_CACHES)
            if batch.dp_rank != (rank or 0):
                continue
            if batch.HasField("load"):
                on_load(batch.load)
            if batch.load.load_only:
                continue
            _check_number(batch, last)
            _check_size(batch)
            if last is None and batch.sequence_number:
                pages.earlier = EARLIER
            last = batch.sequence_number
            events = (ours for event in batch.events for ours in taken(pages, event))
            while some := list(itertools.islice(events, MAX_EVENTS)):
                _note_unknown(pages, batch.snapshot)
                yield KvEvents(next(number), some)
            _note_unknown(pages, batch.snapshot)
        raise WorkerUnavailable("The worker ended its feed of cache events.")
    except grpc.aio.AioRpcError as error:
        raise WorkerUnavailable(f"The worker's feed of cache events ended: {error.code().name}.") from error
    finally:
        call.cancel()


def _note_unknown(pages: Pages, chunk: common_pb2.KvSnapshotChunk) -> None:
    """Note what a relay's snapshot lacks up to *chunk*, though its first chunk begins with a clear."""
    if chunk.unknown_before:
        pages.earlier = EARLIER
    elif chunk.count:
        pages.earlier = SNAPSHOT_LACKS if chunk.index + 1 < chunk.count else ""


def _check_size(batch: common_pb2.KvEventBatch) -> None:
    """Raise WorkerUnavailable if *batch* has more events or pages than a step can make."""
    if len(batch.events) > MAX_BATCH_EVENTS or sum(map(_num_pages, batch.events)) > MAX_BATCH_PAGES:
        raise WorkerUnavailable("The worker's feed of cache events has a batch that is too long.")


def _num_pages(event: common_pb2.KvCacheEvent) -> int:
    return len(event.stored.blocks) + len(event.removed.block_hashes)


def _check_number(batch: common_pb2.KvEventBatch, last: int | None) -> None:
    """Raise WorkerUnavailable unless *batch* follows the batch numbered *last*; each rank numbers its own.

    A snapshot has its chunks in order, so one that comes first must be its first.
    """
    if batch.snapshot.index if last is None else batch.sequence_number != last + 1:
        raise WorkerUnavailable("The worker's feed of cache events has a gap.")
