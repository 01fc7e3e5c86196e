"""Follows the cache events of TokenSpeed and SGLang over SMG's scheduler wires (`SubscribeKvEvents`), in our keys."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2

from saccade.connectors.events.batches import Cleared, Event, Removed, Stored, Unknown
from saccade.connectors.events.reported_cache import ReportedCache
from saccade.errors import WorkerUnavailable
from saccade.protocol.kv_events import KvEvents

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


def event_of(event: common_pb2.KvCacheEvent) -> Event:
    """Return *event* as an engine publishes it."""
    match event.WhichOneof("data"):
        case "stored":
            stored, pages = event.stored, list(event.stored.blocks)
            token_ids = [page.token_ids for page in pages]
            return Stored(
                [page.block_hash for page in pages],
                stored.parent_block_hash if stored.HasField("parent_block_hash") else None,
                list(itertools.chain.from_iterable(token_ids)),
                min(map(len, token_ids), default=0),
                lora_id=next((page.lora_id for page in pages if page.lora_id), None),
                medium=_medium(stored.tier, any(page.cache_level for page in pages)),
                lora_name=stored.lora_name,
                extra_keys=[list(page.extra_keys) for page in pages]
                if any(page.extra_keys for page in pages)
                else None,
                locality=None if stored.locality in LOCAL else "REMOTE",
                cache_salt=stored.cache_salt,
            )
        case "removed":
            removed = event.removed
            return Removed(list(removed.block_hashes), medium=_medium(removed.tier, removed.cache_level > 0))
        case "cleared":
            return Cleared()
        case _:
            return Unknown("an event")


def _medium(tier: int, is_below: bool) -> str | None:
    return None if tier in DEVICE and not is_below else "another tier"


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
    stub: Any, cache: ReportedCache, rank: int | None, on_load: Callable[[common_pb2.EngineLoad], None]
) -> AsyncGenerator[KvEvents, None]:
    """Yield what *cache* learns from the worker of *stub* from now on: an empty snapshot, then increments.

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
                cache.earlier = EARLIER
            last = batch.sequence_number
            events = (ours for event in batch.events for ours in cache.take(event_of(event)))
            while some := list(itertools.islice(events, MAX_EVENTS)):
                _note_unknown(cache, batch.snapshot)
                yield KvEvents(next(number), some)
            _note_unknown(cache, batch.snapshot)
        raise WorkerUnavailable("The worker ended its feed of cache events.")
    except grpc.aio.AioRpcError as error:
        raise WorkerUnavailable(f"The worker's feed of cache events ended: {error.code().name}.") from error
    finally:
        call.cancel()


def _note_unknown(cache: ReportedCache, chunk: common_pb2.KvSnapshotChunk) -> None:
    """Note what a relay's snapshot lacks up to *chunk*, though its first chunk begins with a clear."""
    if chunk.unknown_before:
        cache.earlier = EARLIER
    elif chunk.count:
        cache.earlier = SNAPSHOT_LACKS if chunk.index + 1 < chunk.count else ""


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
