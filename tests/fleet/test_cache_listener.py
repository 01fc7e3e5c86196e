"""The listener keeps the index up to date with what real feeds tell, over a real wire."""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

import grpc
import msgspec
import pytest
from fronts import DESCRIPTION, Front
from prometheus_client import CollectorRegistry
from stub_worker import StubWorker, stub
from tables import table
from waiting import until

from saccade.fleet import index as index_module
from saccade.fleet.feed import ALONE, AWAY, EVENTS_PER_TURN, STARTING, CacheListener
from saccade.fleet.index import BYTES_PER_KEY, BlockIndex, Partition, image_key
from saccade.fleet.metrics import RoutingCollector
from saccade.fleet.pool import WorkerPool
from saccade.fleet.report import worker_report
from saccade.fleet.router import Router
from saccade.fleet.worker import Worker
from saccade.protocol.exactness import Exactness
from saccade.protocol.kv_events import BlockRemoved, BlockStored, ImageRemoved, ImageStored, KvEvent, KvEvents
from saccade.transport.gateway_streams import GatewayStream, Refused
from saccade.transport.server import WorkerServer

PARTITION = Partition(bytes(32), 16)
KEYS = [bytes([number]) * 16 for number in range(4)]


class Telling(Front):
    """A front that tells of blocks what a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds: list[GatewayStream] = []

    def watch(self, blocks: bool, images: bool) -> GatewayStream:
        watcher = super().watch(blocks, images)
        if blocks:
            self.feeds.append(watcher)
        return watcher

    def say(self, number: int, *keys: bytes, snapshot: bool = False, last: bool = True) -> None:
        events: list[KvEvent] = [BlockStored(key, b"", []) for key in keys]
        self.feeds[-1].send(msgspec.msgpack.encode(KvEvents(number, events, snapshot, last)))

    def images(self, number: int, *events: KvEvent, snapshot: bool = False) -> None:
        self.watchers[-1].send(msgspec.msgpack.encode(KvEvents(number, list(events), snapshot)))


@contextlib.asynccontextmanager
async def listening(
    folder: Path, num_workers: int, max_bytes: int = 1 << 20
) -> AsyncIterator[tuple[list[Telling], WorkerPool, CacheListener]]:
    """Fronts at sockets in *folder*, a fleet of them that is ready, and what listens to it."""
    fronts = [Telling() for _ in range(num_workers)]
    servers = [WorkerServer(front, f"unix:{folder}/{number}.sock") for number, front in enumerate(fronts)]
    for server in servers:
        await server.start()
    worker_pool = WorkerPool([server.address for server in servers], lambda _: None)
    listener = CacheListener(worker_pool, Router("auto", BlockIndex(max_bytes), Random(0)))
    await worker_pool.start()
    try:
        await until(lambda: all(client.state.ready for client in worker_pool.clients))
        yield fronts, worker_pool, listener
    finally:
        await listener.close()
        await worker_pool.close()
        for server in servers:
            await server.stop()


def held(index: BlockIndex, worker: Worker) -> int:
    """How many of the first blocks *worker* is known to hold."""
    return int(index.overlaps(PARTITION, KEYS)[index.places_of([worker.url])[0]])


async def test_each_worker_is_known_by_its_own_feed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with listening(tmp_path, 2) as (fronts, worker_pool, listener):
        a, b = worker_pool.clients
        index = listener.router.index
        await until(lambda: fronts[0].feeds and fronts[1].feeds)
        assert listener.feed(a).reason == STARTING
        fronts[0].say(4, KEYS[0], snapshot=True, last=False)
        fronts[0].say(4, KEYS[1], snapshot=True)
        fronts[0].say(5, KEYS[2])
        await until(lambda: held(index, a) == 3)
        assert listener.feed(a).reason == ""
        assert held(index, b) == 0
        assert f"worker {a.url} are EXACT" in caplog.text
        report = worker_report(a, worker_pool, listener)
        assert (report.exactness, report.holdings.blocks, report.ready) == ("EXACT", 3, True)
        assert worker_report(b, worker_pool, listener).exactness == "NONE"
        registry = CollectorRegistry()
        registry.register(RoutingCollector(worker_pool, listener))
        assert registry.get_sample_value("saccade_router_exact", {"worker": a.url, "reason": ""}) == 1
        assert registry.get_sample_value("saccade_router_indexed_blocks", {"worker": a.url}) == 3
        assert registry.get_sample_value("saccade_router_events_total", {"worker": a.url}) == 3


@table("fault", ["gap", "reordered", "repeated", "another snapshot", "restart", "nonsense"])
async def test_lost_feed_is_cleared_and_requested_again(tmp_path: Path, fault: str) -> None:
    async with listening(tmp_path, 2) as (fronts, worker_pool, listener):
        front, a = fronts[0], worker_pool.clients[0]
        index = listener.router.index
        await until(lambda: front.feeds)
        front.say(1, *KEYS, snapshot=True)
        front.say(2, KEYS[0])
        await until(lambda: index.is_exact(a.url) and listener.feed(a).num_events == 5)
        numbers = {"gap": 4, "reordered": 1, "repeated": 2}
        if fault in numbers:
            front.say(numbers[fault], KEYS[0])
        elif fault == "another snapshot":
            front.say(3, KEYS[0], snapshot=True)
        elif fault == "restart":
            front.feeds[-1].end(Refused(grpc.StatusCode.UNAVAILABLE, "The engine is gone."))
        else:
            front.feeds[-1].send(b"\xc1")
        await until(lambda: len(front.feeds) == 2)
        assert listener.feed(a).reason
        assert index.num_blocks(a.url) == 0
        front.say(0, KEYS[0], snapshot=True)
        await until(lambda: held(index, a) == 1)
        assert listener.feed(a).reason == ""
        assert (listener.feed(a).num_snapshots, listener.feed(a).num_lost) == (2, 1)


async def test_an_orphan_is_dropped_and_shown(tmp_path: Path) -> None:
    async with listening(tmp_path, 2) as (fronts, worker_pool, listener):
        front, a = fronts[0], worker_pool.clients[0]
        await until(lambda: front.feeds)
        orphan = BlockStored(KEYS[1], KEYS[0], [], is_first=False)
        front.feeds[-1].send(msgspec.msgpack.encode(KvEvents(1, [orphan], snapshot=True)))
        await until(lambda: not listener.feed(a).reason)
        assert listener.router.index.num_blocks(a.url) == 0
        registry = CollectorRegistry()
        registry.register(RoutingCollector(worker_pool, listener))
        assert registry.get_sample_value("saccade_router_orphans_total", {"worker": a.url}) == 1
        assert registry.get_sample_value("saccade_router_lost_feeds_total", {"worker": a.url}) == 0
        assert registry.get_sample_value("saccade_router_breaker_closed", {"worker": a.url}) == 1


async def flood(num_events: int) -> AsyncGenerator[KvEvents, None]:
    """Yield messages of as many new blocks, without end, and without a wait."""
    for number in itertools.count():
        keys = range(number * num_events, (number + 1) * num_events)
        events: list[KvEvent] = [BlockStored(key.to_bytes(16, "big"), b"", []) for key in keys]
        yield KvEvents(number, events, snapshot=number == 0)


def changing(url: str) -> StubWorker:
    """A worker that finds between two messages that its events do not tell all."""
    worker = stub(url, DESCRIPTION)

    async def feed() -> AsyncGenerator[KvEvents, None]:
        yield KvEvents(0, [], snapshot=True)
        worker.become(exactness=Exactness("DEGRADED", "it reports what is not known"))
        yield KvEvents(1, [])
        yield KvEvents(2, [])
        await asyncio.Event().wait()

    worker.feed = feed
    return worker


async def test_a_level_that_changes_within_a_feed_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:  # E5
    caplog.set_level(logging.INFO)
    worker_pool = WorkerPool((), lambda _: None)
    listener = CacheListener(worker_pool, Router("auto", BlockIndex(1 << 20), Random(0)))
    workers = [changing(f"w{number}") for number in range(2)]
    for worker in workers:
        worker_pool.add(worker)
    worker_pool.changed(worker_pool.clients[0])
    await asyncio.sleep(0)
    await until(lambda: caplog.text.count("are DEGRADED") == 2)
    await asyncio.sleep(0.01)
    await listener.close()
    for worker in workers:
        assert caplog.text.count(f"worker {worker.url} are EXACT: all that they hold is known") == 1
        assert caplog.text.count(f"worker {worker.url} are DEGRADED: it reports what is not known") == 1


async def test_flood_of_events_leaves_the_loop_to_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn of the loop learns more than one message of at most EVENTS_PER_TURN events, however many workers."""
    worker_pool = WorkerPool((), lambda _: None)
    listener = CacheListener(worker_pool, Router("auto", BlockIndex(1 << 30), Random(0)))
    turns, learnt = itertools.count(), []
    take = BlockIndex.take
    turn = 0

    def noted(index: BlockIndex, worker: str, message: KvEvents) -> int:
        learnt.append((turn, len(message.events)))
        return take(index, worker, message)

    monkeypatch.setattr(BlockIndex, "take", noted)
    for number in range(4):
        worker_pool.add(worker := stub(f"w{number}", DESCRIPTION))
        worker.feed = partial(flood, 5 * EVENTS_PER_TURN // 2)
    worker_pool.changed(worker_pool.clients[0])
    await asyncio.sleep(0)
    while len(learnt) < 40:
        await asyncio.sleep(0)
        turn = next(turns)
    await listener.close()
    assert {count for _, count in learnt} == {EVENTS_PER_TURN, EVENTS_PER_TURN // 2}
    assert max(Counter(turn for turn, _ in learnt).values()) == 1
    assert turn > 40


async def test_a_worker_that_does_not_fit_is_not_known(tmp_path: Path) -> None:
    room = 2 * DESCRIPTION.num_blocks
    async with listening(tmp_path, 2, max_bytes=room * BYTES_PER_KEY) as (fronts, worker_pool, listener):
        a, b = worker_pool.clients
        await until(lambda: fronts[0].feeds and fronts[1].feeds)
        fronts[0].say(1, KEYS[0], snapshot=True)
        await until(lambda: not listener.feed(a).reason)
        assert held(listener.router.index, a) == 1  # of the two, a is found
        fronts[1].say(1, *(number.to_bytes(16, "big") for number in range(1, room + 1)), snapshot=True)
        await until(lambda: "full" in listener.feed(b).reason)
        assert held(listener.router.index, a) == 1
        assert not listener.router.index.is_over


async def test_a_worker_for_which_there_is_no_room_is_not_followed(tmp_path: Path) -> None:
    async with listening(tmp_path, 2, max_bytes=0) as (_, worker_pool, listener):
        await until(lambda: all("--routing-index-bytes" in listener.feed(one).reason for one in worker_pool.clients))
        page = CollectorRegistry()
        page.register(RoutingCollector(worker_pool, listener))
        assert page.get_sample_value("saccade_router_unindexed_workers") == 2


class Full(StubWorker):
    """A worker whose cache holds *num_blocks* blocks of its own and changes all the time."""

    def __init__(self, number: int, num_blocks: int, announced: int | None = None) -> None:
        super().__init__(f"w{number}", feed=self.tell)
        self.become(description=msgspec.structs.replace(DESCRIPTION, num_blocks=announced or num_blocks))
        self.num_blocks = num_blocks
        self.num_told = 0

    def key(self, number: int) -> bytes:
        return self.url.encode().ljust(8) + number.to_bytes(8, "big")

    async def tell(self) -> AsyncGenerator[KvEvents, None]:
        """Yield a snapshot, then changes without end: every message replaces a tenth of the blocks."""
        size, step = self.num_blocks, self.num_blocks // 10
        yield KvEvents(0, [BlockStored(self.key(number), b"", []) for number in range(size)], snapshot=True)
        for message in itertools.count(1):
            self.num_told += 1
            first = (message - 1) * step
            removed: list[KvEvent] = [BlockRemoved(self.key(number)) for number in range(first, first + step)]
            stored = [BlockStored(self.key(size + number), b"", []) for number in range(first, first + step)]
            yield KvEvents(message, [*removed, *stored])


@contextlib.asynccontextmanager
async def following(
    workers: Sequence[Full], max_bytes: int, waits: list[float], sizes: list[int]
) -> AsyncIterator[tuple[WorkerPool, CacheListener]]:
    """A listener for whom no time passes; *waits* and *sizes* get every sleep, and the index's size then."""
    worker_pool = WorkerPool((), lambda _: None)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        sizes.append(listener.index_bytes)
        await asyncio.sleep(0)

    listener = CacheListener(worker_pool, Router("auto", BlockIndex(max_bytes), Random(0)), sleep)
    for worker in workers:
        worker_pool.add(worker)
    worker_pool.changed(worker_pool.clients[0])
    await asyncio.sleep(0)
    try:
        yield worker_pool, listener
    finally:
        await listener.close()


def exact_workers(workers: Sequence[Full], listener: CacheListener) -> list[str]:
    known = [worker.url for worker in workers if listener.router.index.is_exact(worker.url)]
    assert known == [worker.url for worker in workers if not listener.feed(worker).reason]
    return known


@pytest.mark.conformance
async def test_of_a_fleet_larger_than_the_index_a_steady_part_is_known() -> None:
    workers = [Full(number, 50) for number in range(120)]
    waits: list[float] = []
    sizes: list[int] = []
    max_bytes = 50 * BYTES_PER_KEY * 67 // 2  # of 33.5 workers
    async with following(workers, max_bytes, waits, sizes) as (worker_pool, listener):
        registry = CollectorRegistry()
        registry.register(RoutingCollector(worker_pool, listener))
        await until(lambda: workers[0].num_told > 1)
        known = exact_workers(workers, listener)
        assert len(known) == 33
        for count in range(2, 40):
            await until(lambda count=count: workers[0].num_told > count)
            assert exact_workers(workers, listener) == known
        assert max(sizes) <= max_bytes
        assert {wait for wait in waits if wait >= 1} > {1, 2, 4, 8}
        assert registry.get_sample_value("saccade_router_unindexed_workers") == 120 - 33
        assert registry.get_sample_value("saccade_router_unindexed_blocks") == 50 * (120 - 33)


async def test_workers_that_hold_more_than_they_announce_do_not_drive_out_others() -> None:
    """The bound is exceeded by no more than one message."""
    workers = [Full(number, 50, announced=1) for number in range(6)]
    waits: list[float] = []
    sizes: list[int] = []
    max_bytes = 50 * BYTES_PER_KEY * 5 // 2
    async with following(workers, max_bytes, waits, sizes) as (_, listener):
        await until(lambda: workers[0].num_told > 1)
        for count in range(1, 20):
            await until(lambda count=count: workers[0].num_told > count)
            assert exact_workers(workers, listener)[:2] == ["w0", "w1"]
        assert max(sizes) <= max_bytes + 50 * BYTES_PER_KEY
        assert {wait for wait in waits if wait >= 1} > {1, 2, 4}


async def test_a_worker_that_is_away_is_not_known(tmp_path: Path) -> None:
    async with listening(tmp_path, 2) as (fronts, worker_pool, listener):
        a = worker_pool.clients[0]
        await until(lambda: fronts[0].feeds)
        fronts[0].say(1, KEYS[0], snapshot=True)
        await until(lambda: not listener.feed(a).reason)
        await a.close()
        await until(lambda: listener.feed(a).reason == AWAY)
        assert listener.router.index.num_blocks(a.url) == 0


def have_image(listener: CacheListener, worker: Worker) -> bool:
    index = listener.router.index
    return bool(index.have_images([image_key(b"salt", b"a")])[0][index.places_of([worker.url])[0]])


async def test_of_a_worker_that_is_alone_only_images_are_known_and_its_blocks_once_another_comes(
    tmp_path: Path,
) -> None:  # F5
    async with listening(tmp_path, 1) as ((front,), worker_pool, listener):
        (worker,) = worker_pool.clients
        await until(lambda: front.watchers)
        assert front.watched == [(False, True)]
        assert listener.feed(worker).reason == ALONE
        front.images(1, ImageStored(b"salt", b"a"), snapshot=True)
        await until(lambda: have_image(listener, worker))
        assert not listener.router.index.is_exact(worker.url)
        front.images(2, ImageRemoved(b"salt", b"a"))
        await until(lambda: not have_image(listener, worker))
        front.images(4, ImageStored(b"salt", b"a"))  # a gap
        await until(lambda: len(front.watchers) == 2)
        worker_pool.add(stub("unix:/other", DESCRIPTION))
        worker_pool.changed(worker)
        await until(lambda: front.feeds)
        assert front.watched[2:] == [(True, True)]
        front.say(1, KEYS[0], snapshot=True, last=False)
        front.feeds[-1].send(msgspec.msgpack.encode(KvEvents(1, [ImageStored(b"salt", b"a")], snapshot=True)))
        await until(lambda: not listener.feed(worker).reason)
        assert (held(listener.router.index, worker), have_image(listener, worker)) == (1, True)


async def test_images_of_a_worker_are_known_while_its_blocks_do_not_fit(tmp_path: Path) -> None:  # F5
    async with listening(tmp_path, 2, max_bytes=0) as ((front, _), worker_pool, listener):
        worker = worker_pool.clients[0]
        await until(lambda: front.watchers)
        front.images(1, ImageStored(b"salt", b"a"), snapshot=True)
        await until(lambda: have_image(listener, worker))
        assert "--routing-index-bytes" in listener.feed(worker).reason
        assert not front.feeds


def test_number_of_known_images_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_IMAGES", 3)
    index, names = BlockIndex(0), [bytes([number]) for number in range(5)]
    index.begin_images("w")
    index.take("w", KvEvents(1, [*(ImageStored(b"", name) for name in names), ImageRemoved(b"", b"\0")]))
    index.take("w", KvEvents(2, [ImageStored(b"", names[4])]))
    assert index.have_images(names)[:, 0].tolist() == [False, True, True, False, True]


async def test_a_worker_without_reports_is_served_all_the_same(tmp_path: Path) -> None:
    worker_pool = WorkerPool(["tokenspeed://127.0.0.1:1", f"unix:{tmp_path}/w.sock"], lambda _: None)
    listener = CacheListener(worker_pool, Router("auto", BlockIndex(0), Random(0)))
    silent, away = worker_pool.clients
    assert listener.feed(silent).reason == silent.exactness.reason
    assert worker_report(silent, worker_pool, listener).exactness == "NONE"
    assert listener.feed(away).reason == AWAY
