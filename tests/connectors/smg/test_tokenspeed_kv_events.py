"""What a TokenSpeed worker tells of its cache, over the wire, in the keys of the requests that it was sent."""

import contextlib
import time
from random import Random
from typing import Any

import grpc
import msgspec
import pytest
from smg_grpc_proto.generated import common_pb2
from streams import generate
from tables import table
from test_smg_kv_events import removed, stored
from tokenspeed_worker import PIXELS, PLACEHOLDER, Slots, TokenSpeedWorker, image, listening, registered, zipped
from waiting import until

from saccade.connectors.context import Traits
from saccade.connectors.events.sent_images import FIRST_PAD, NOT_SENT
from saccade.connectors.smg import kv_events as smg_kv_events
from saccade.connectors.smg.client import MAX_REPLY_BYTES, TENANTS_OF_ANOTHER
from saccade.connectors.smg.tokenspeed import TokenSpeedClient
from saccade.connectors.smg.tokenspeed_messages import pad
from saccade.errors import WorkerUnavailable
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.pool import WorkerPool
from saccade.fleet.router import Router
from saccade.identity.blocks import MediaRun, block_keys, root_key
from saccade.protocol.exactness import EXACT
from saccade.protocol.kv_events import BlockStored, KvEvents
from saccade.protocol.request import EngineRequest, SamplingParams

ITEM = image(inline=PIXELS)
REQUEST = EngineRequest(
    request_id="r1",
    token_ids=[5, PLACEHOLDER, PLACEHOLDER, *range(29)],
    sampling=SamplingParams(max_tokens=10, stop_token_ids=(7,)),
    media=(ITEM,),
)
NOTHING = common_pb2.KvCacheEvent()
HELD = [5, pad(ITEM, b""), pad(ITEM, b""), *range(29)]


@pytest.fixture
def worker() -> TokenSpeedWorker:
    worker = TokenSpeedWorker()
    worker.events = []
    return worker


def batch(number: int, *events: Any, **fields: Any) -> common_pb2.KvEventBatch:
    return common_pb2.KvEventBatch(sequence_number=number, events=events, **fields)


def keys(client: TokenSpeedClient, request: EngineRequest = REQUEST) -> list[bytes]:
    assert client.description is not None
    runs = [MediaRun(1, 2, ITEM.content_hash)]
    return block_keys(root_key(client.description.fingerprint, request.salt), request.token_ids, runs, 16)


async def told(client: TokenSpeedClient, num_messages: int) -> list[KvEvents]:
    async with contextlib.aclosing(client.kv_events(blocks=True)) as messages:
        return [await anext(messages) for _ in range(num_messages)]


async def test_an_image_is_known_by_the_pad_of_its_hash(worker: TokenSpeedWorker, slots: Slots) -> None:  # E5, E8
    worker.events = [batch(4, stored(HELD))]
    async with listening(worker) as url, registered(url, slots) as client:
        assert client.exactness == EXACT
        assert await told(client, 1) == [KvEvents(0, [], snapshot=True)]
        [delta async for delta in generate(client, REQUEST)]
        _, message = await told(client, 2)
        first, second = keys(client)
        assert message.number == 1
        root = root_key(client.description.fingerprint, b"") if client.description else b""
        assert message.events == [BlockStored(first, root, []), BlockStored(second, first, [], is_first=False)]
        assert (client.exactness.level, client.exactness.reason) == ("DEGRADED", smg_kv_events.EARLIER)


async def test_a_cache_that_was_cleared_is_known_as_a_whole(worker: TokenSpeedWorker, slots: Slots) -> None:  # E5
    cleared = common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
    worker.events = [batch(4, stored(list(range(16)))), batch(5, cleared), batch(6, stored(list(range(16))))]
    async with listening(worker) as url, registered(url, slots) as client:
        await told(client, 4)
        assert client.exactness == EXACT


async def test_a_relays_snapshot_may_lack_what_came_before_it(worker: TokenSpeedWorker, slots: Slots) -> None:
    cleared = common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
    late = batch(5, cleared)
    late.snapshot.unknown_before = 5
    worker.events = [late, batch(6, stored(list(range(16))))]
    async with listening(worker) as url, registered(url, slots) as client:
        await told(client, 2)
        assert (client.exactness.level, client.exactness.reason) == ("DEGRADED", smg_kv_events.EARLIER)


async def test_relayed_snapshot_is_known_once_complete(worker: TokenSpeedWorker, slots: Slots) -> None:
    cleared = common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
    events = [stored(list(range(16)), base=10 * number) for number in range(3)]
    chunks = [batch(5, cleared, events[0]), batch(6, events[1]), batch(7, events[2])]
    for index, chunk in enumerate(chunks):
        chunk.snapshot.index, chunk.snapshot.count = index, len(chunks)
    worker.events = chunks
    async with listening(worker) as url, registered(url, slots) as client:
        async with contextlib.aclosing(client.kv_events(blocks=True)) as messages:
            await anext(messages)
            reasons = []
            for _ in chunks:
                await anext(messages)
                reasons.append(client.exactness.reason)
        assert reasons == [smg_kv_events.SNAPSHOT_LACKS, smg_kv_events.SNAPSHOT_LACKS, ""]
        assert client.exactness == EXACT


async def test_unreadable_pages_of_a_snapshot_stay_unknown(worker: TokenSpeedWorker, slots: Slots) -> None:
    unread = stored([FIRST_PAD] * 16)
    chunks = [
        batch(5, common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()), unread),
        batch(6, stored([1] * 16)),
    ]
    for index, chunk in enumerate(chunks):
        chunk.snapshot.index, chunk.snapshot.count = index, len(chunks)
    worker.events = chunks
    async with listening(worker) as url, registered(url, slots) as client:
        await told(client, 2)
        assert (client.exactness.level, client.exactness.reason) == ("DEGRADED", NOT_SENT)


async def test_an_image_of_a_tenant(worker: TokenSpeedWorker, slots: Slots) -> None:  # contract 1
    asked = EngineRequest(
        request_id="r", token_ids=REQUEST.token_ids, sampling=REQUEST.sampling, media=(ITEM,), salt=b"tenant"
    )
    there = pad(ITEM, b"tenant")
    worker.events = [batch(0, stored([5, there, there, *range(29)]))]
    async with listening(worker) as url, registered(url, slots) as client:
        [delta async for delta in generate(client, asked)]
        _, message = await told(client, 2)
        assert [event.key for event in message.events if isinstance(event, BlockStored)] == keys(client, asked)


async def test_tenants_are_not_known_to_another_process_that_reads_the_events(
    worker: TokenSpeedWorker, slots: Slots
) -> None:
    async with listening(worker) as url, registered(url, slots) as client:
        [delta async for delta in generate(client, REQUEST)]
        assert client.exactness == EXACT
        [delta async for delta in generate(client, msgspec.structs.replace(REQUEST, salt=b"tenant"))]
        assert (client.exactness.level, client.exactness.reason) == ("DEGRADED", TENANTS_OF_ANOTHER)


async def test_large_batches_are_reported_in_parts(
    worker: TokenSpeedWorker, slots: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smg_kv_events, "MAX_EVENTS", 3)
    worker.events = [batch(0, stored(list(range(64)))), batch(1, stored(list(range(100, 132)), base=10))]
    async with listening(worker) as url, registered(url, slots) as client:
        messages = await told(client, 4)
    assert [(message.number, len(message.events)) for message in messages] == [(0, 0), (1, 3), (2, 1), (3, 2)]


async def test_load_between_batches_is_no_event(worker: TokenSpeedWorker, slots: Slots) -> None:
    record = batch(0, load=common_pb2.EngineLoad(load_only=True))
    worker.events = [
        record,
        batch(7, stored(list(range(16)))),
        batch(7, load=record.load),
        batch(8, stored([9] * 16, base=10)),
    ]
    async with listening(worker) as url, registered(url, slots) as client:
        assert [len(message.events) for message in await told(client, 3)] == [0, 1, 1]


@table("load_only", [False, True])
async def test_pushed_load_is_the_workers(worker: TokenSpeedWorker, slots: Slots, load_only: bool) -> None:
    record = common_pb2.EngineLoad(running_requests=5, waiting_requests=3, token_usage=0.25, load_only=load_only)
    reported: list[TokenSpeedClient] = []
    async with listening(worker) as url, registered(url, slots, on_load=reported.append) as client:
        await until(lambda: client.load)
        worker.events = [batch(0, load=record), batch(1, stored(list(range(16))))]
        num_polled, before = len(reported), time.monotonic()
        await told(client, 2)
        load = client.load
        assert load is not None
        assert (load.num_running, load.num_waiting, load.num_blocks, load.num_free_blocks) == (5, 3, 64, 48)
        assert before <= client.load_times[1] <= time.monotonic()
        assert len(reported) > num_polled


async def test_pushed_load_was_true_before_it_arrived(worker: TokenSpeedWorker, slots: Slots) -> None:
    worker.events = [batch(0, stored(list(range(16))), load=common_pb2.EngineLoad(age_ms=2500))]
    async with listening(worker) as url, registered(url, slots) as client:
        await until(lambda: client.load)
        await told(client, 2)
        since, until_then = client.load_times
        assert until_then - since == pytest.approx(2.5, abs=1e-3)


async def test_a_rank_follows_only_its_own_batches(worker: TokenSpeedWorker, slots: Slots) -> None:  # E5
    worker.arguments["dp_size"] = 2
    worker.events = [
        batch(0, stored(list(range(16)))),
        batch(0, stored([9] * 32, base=10), dp_rank=1),
        batch(1, stored([8] * 16, base=20)),
        batch(1, stored([7] * 16, base=30), dp_rank=1),
    ]
    async with listening(worker) as url, registered(f"{url}?rank=1", slots) as client:
        assert [len(message.events) for message in await told(client, 3)] == [0, 2, 1]


@table(
    ("events", "reason"),
    [
        ([batch(1), batch(3)], "gap"),
        ([batch(1), batch(1)], "gap"),
        ([batch(1, snapshot=common_pb2.KvSnapshotChunk(index=1, count=2))], "gap"),
        ([batch(1, dp_rank=1)], "data-parallel"),
        ([batch(1, *[NOTHING] * (smg_kv_events.MAX_BATCH_EVENTS + 1))], "too long"),
        ([batch(1, removed(*[1] * (smg_kv_events.MAX_BATCH_PAGES + 1)))], "too long"),
        ([batch(1, stored([1 << 21] * (MAX_REPLY_BYTES // 4), MAX_REPLY_BYTES // 4))], "RESOURCE_EXHAUSTED"),
        ([grpc.StatusCode.DATA_LOSS], "DATA_LOSS"),
    ],
)
async def test_a_feed_that_cannot_be_followed_ends(
    worker: TokenSpeedWorker, slots: Slots, events: list[Any], reason: str
) -> None:  # E5
    worker.events = events
    async with listening(worker) as url, registered(url, slots) as client:
        with pytest.raises(WorkerUnavailable, match=reason) as caught:
            await told(client, 3)
    assert "words" not in caught.value.message


async def test_a_worker_without_events(slots: Slots) -> None:  # E5
    async with listening(TokenSpeedWorker()) as url, registered(url, slots) as client:
        assert client.exactness.level == "NONE"
        assert "--kv-events-config" in client.exactness.reason
        with pytest.raises(WorkerUnavailable, match="--kv-events-config"):
            await told(client, 1)
    assert client.exactness.reason == "it is not ready"
    with pytest.raises(WorkerUnavailable, match="not ready"):
        await told(client, 1)


async def test_models_that_resume_from_more_than_blocks(worker: TokenSpeedWorker, slots: Slots) -> None:
    options = {"traits": lambda _: Traits(keeps_every_token=False)}
    async with listening(worker) as url, registered(url, slots, **options) as client:
        assert client.exactness.level == "NONE"
        assert "resume" in client.exactness.reason


async def test_index_learns_the_holdings_of_the_worker(worker: TokenSpeedWorker, slots: Slots) -> None:  # E8
    """A fleet of two: each image's blocks are counted where they are held."""
    empty = TokenSpeedWorker()
    empty.bundle = worker.bundle = zipped({"config.json": b'{"architectures": ["Qwen3VLForConditionalGeneration"]}'})
    async with listening(worker) as url, listening(empty) as other:
        fleet = WorkerPool([url, other], slots.released.extend)
        router = Router("auto", BlockIndex(1 << 20), Random())
        listener = CacheListener(fleet, router)
        await fleet.start()
        await until(lambda: all(client.ready for client in fleet.clients))
        client = fleet.clients[0]
        assert client.description is not None
        await until(lambda: router.index.is_exact(url))
        [delta async for delta in generate(client, REQUEST)]
        assert worker.events is not None
        worker.events.append(batch(0, stored(HELD)))
        partition = Partition(client.description.fingerprint, 16)
        assert isinstance(client, TokenSpeedClient)
        await until(lambda: router.index.overlaps(partition, keys(client))[router.index.places_of([url])[0]] == 2)
        assert listener.feed(fleet.clients[1]).reason == fleet.clients[1].exactness.reason
        assert "--kv-events-config" in listener.feed(fleet.clients[1]).reason
        await listener.close()
        await fleet.close()
