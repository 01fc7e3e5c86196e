"""Gateway processes ask an indexer what workers hold; without it nothing is known, and all is known again after."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random

import msgspec
import pytest
from fronts import DESCRIPTION, Front
from prometheus_client import CollectorRegistry
from stub_worker import TEXT_PREFIX, stub
from waiting import until

from saccade.fleet import shared as shared_index
from saccade.fleet.feed import ALONE, AWAY
from saccade.fleet.index import BlockIndex, Partition, image_key
from saccade.fleet.lookup import Overlaps, Targets
from saccade.fleet.metrics import RoutingCollector
from saccade.fleet.pool import WorkerPool
from saccade.fleet.report import worker_report
from saccade.fleet.router import Router
from saccade.fleet.settings import SourceConfig
from saccade.fleet.shared import UNREACHABLE, SharedIndex
from saccade.fleet.worker import Worker
from saccade.gateway.siblings import Indexer, serve_index
from saccade.protocol.exactness import EXACT, Exactness
from saccade.protocol.gateway_calls import FeedState, FindOverlaps, KnownWorkers
from saccade.protocol.kv_events import BlockStored, ImageStored, KvEvent, KvEvents
from saccade.transport.framing import Frames
from saccade.transport.gateway_streams import GatewayStream
from saccade.transport.local_calls import NUMBER_BYTES, CallServer
from saccade.transport.server import WorkerServer

PARTITION = Partition(bytes(32), 16)
OTHER = Partition(b"other".ljust(32), 16)
KEYS = [bytes([number]) * 16 for number in range(4)]
IMAGE = image_key(b"salt", b"image")


class Holding(Front):
    """A front whose caches hold the first *count* of KEYS, and IMAGE with three of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def watch(self, blocks: bool, images: bool) -> GatewayStream:
        watcher = super().watch(blocks, images)
        if blocks:
            events: list[KvEvent] = [BlockStored(key, b"", []) for key in KEYS[: self._count]]
            if self._count == 3:
                events.append(ImageStored(b"salt", b"image"))
            watcher.send(msgspec.msgpack.encode(KvEvents(1, events, snapshot=True)))
        return watcher


@contextlib.asynccontextmanager
async def fronts(folder: Path, *counts: int) -> AsyncIterator[list[str]]:
    """The addresses of fronts that hold so many blocks each."""
    servers = [WorkerServer(Holding(count), f"unix:{folder}/{number}.sock") for number, count in enumerate(counts)]
    for server in servers:
        await server.start()
    try:
        yield [server.address for server in servers]
    finally:
        for server in servers:
            await server.stop()


@contextlib.asynccontextmanager
async def indexing(urls: list[str], path: Path) -> AsyncIterator[Indexer]:
    """An indexer at *path* that follows *urls*."""
    indexer = Indexer(WorkerPool(urls, lambda _: None), path)
    await indexer.start()
    try:
        yield indexer
    finally:
        await indexer.close()


@contextlib.asynccontextmanager
async def asking(urls: list[str], path: Path) -> AsyncIterator[tuple[WorkerPool, SharedIndex]]:
    """A gateway process's fleet, and its view of the indexer at *path*."""
    worker_pool = WorkerPool(urls, lambda _: None)
    shared = SharedIndex(worker_pool, Router("auto", BlockIndex(0), Random(0)), path)
    await worker_pool.start()
    shared.start()
    try:
        await until(lambda: all(client.state.ready for client in worker_pool.clients))
        yield worker_pool, shared
    finally:
        await shared.close()
        await worker_pool.close()


def in_lists(found: Overlaps) -> tuple[list[int], list[bool]]:
    return found.num_blocks.tolist(), found.are_exact.tolist()


async def test_two_processes_share_one_indexer(tmp_path: Path) -> None:  # E5
    path = tmp_path / "indexer.sock"
    async with (
        fronts(tmp_path, 3, 1) as urls,
        indexing(urls, path),
        asking(urls, path) as (worker_pool, one),
        asking(urls, path) as (_, other),
    ):
        targets = Targets((*urls, "unix:/none"), (*[PARTITION] * len(urls), OTHER))
        for shared in (one, other):
            for worker in worker_pool.clients:
                await until(partial(is_known, shared, worker))
            found = await shared.overlaps(targets, {PARTITION: KEYS, OTHER: KEYS}, [IMAGE, b"other"])
            assert found.have_images.tolist() == [[True, False, False], [False, False, False]]
            assert in_lists(found) == ([3, 1, 0], [True, True, False])
        report = worker_report(worker_pool.clients[0], worker_pool, one)
        assert (report.exactness, report.reason, report.holdings.blocks) == ("EXACT", "", 3)
        registry = CollectorRegistry()
        registry.register(RoutingCollector(worker_pool, one))
        assert registry.get_sample_value("saccade_router_indexed_blocks", {"worker": urls[0]}) == 3
        assert registry.get_sample_value("saccade_router_snapshots_total", {"worker": urls[1]}) == 1
        assert (registry.get_sample_value("saccade_router_index_bytes") or 0) > 0


def is_known(shared: SharedIndex, worker: Worker) -> bool:
    return not shared.feed(worker).reason


async def test_without_an_indexer_nothing_is_known_and_one_that_comes_knows_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # E5
    caplog.set_level(logging.INFO)
    path = tmp_path / "indexer.sock"
    async with fronts(tmp_path, 2, 0) as urls, asking(urls, path) as (worker_pool, shared):
        targets = Targets(urls, [PARTITION] * len(urls))
        for _ in range(2):
            assert in_lists(await shared.overlaps(targets, {PARTITION: KEYS}, ())) == ([0, 0], [False, False])
            report = worker_report(worker_pool.clients[0], worker_pool, shared)
            assert (report.exactness, report.reason, report.holdings.blocks) == ("NONE", UNREACHABLE, 0)
            async with indexing(urls, path):
                await until(lambda: not shared.feed(worker_pool.clients[0]).reason)
                found = await shared.overlaps(targets, {PARTITION: KEYS}, ())
                assert (found.num_blocks[0], found.are_exact[0]) == (2, True)
            await until(lambda: shared.feed(worker_pool.clients[0]).reason == UNREACHABLE)
    assert caplog.text.count(f"the caches of all workers are NONE: {UNREACHABLE}") == 2


async def test_an_indexer_that_hangs_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look-up without an answer the next ones do not wait, until the indexer answers a poll again."""
    monkeypatch.setattr(shared_index, "LOOKUP_SECONDS", 0.05)
    monkeypatch.setattr(shared_index, "POLL_SECONDS", 60.0)
    path = tmp_path / "indexer.sock"
    known = FeedState(exactness=EXACT)
    looked_up: list[bytes] = []

    def stream() -> Frames:
        """A stream that answers polls and no look-up."""

        def take(payload: bytes) -> None:
            if b"find" in payload:
                looked_up.append(payload)
            else:
                frames.send(payload[:NUMBER_BYTES] + msgspec.msgpack.encode(KnownWorkers({"unix:/a": known}, 0)))

        frames = Frames(take, lambda: 1 << 20)
        return frames

    server = await asyncio.get_running_loop().create_unix_server(stream, str(path))
    worker_pool = WorkerPool((), lambda _: None)
    for url in ("unix:/a", "unix:/b"):
        worker_pool.add(stub(url, DESCRIPTION))
    shared = SharedIndex(worker_pool, Router("auto", BlockIndex(0), Random(0)), path)
    shared.start()
    try:
        await until(lambda: shared.feed(worker_pool.clients[0]).reason == "")
        assert shared.feed(worker_pool.clients[1]).reason == AWAY
        other = Targets(["unix:/b"], [PARTITION])
        assert in_lists(await shared.overlaps(other, {PARTITION: KEYS}, ())) == ([0], [False])
        assert not looked_up
        target = Targets(["unix:/a"], [PARTITION])
        for _ in range(5):
            assert in_lists(await shared.overlaps(target, {PARTITION: KEYS}, ())) == ([0], [False])
        assert len(looked_up) == 1
        assert shared.feed(worker_pool.clients[0]).reason == UNREACHABLE
    finally:
        await shared.close()
        server.close()


async def test_a_worker_is_never_more_exact_than_either_process_sees(tmp_path: Path) -> None:  # E5
    """The indexer has read the events; the gateway has seen what the worker answers."""
    worker_pool = WorkerPool((), lambda _: None)
    text, exact = stub("unix:/text", DESCRIPTION, exactness=TEXT_PREFIX), stub("unix:/exact", DESCRIPTION)
    for worker in (text, exact):
        worker_pool.add(worker)
    degraded = Exactness("DEGRADED", "its events began later")
    known = {text.url: FeedState(exactness=EXACT), exact.url: FeedState(exactness=degraded)}
    server = CallServer(tmp_path / "i.sock", lambda _: msgspec.msgpack.encode(KnownWorkers(known, 0)))
    await server.start()
    shared = SharedIndex(worker_pool, Router("auto", BlockIndex(0), Random(0)), tmp_path / "i.sock")
    shared.start()
    try:
        await until(lambda: not shared.feed(text).reason)
        reports = [worker_report(worker, worker_pool, shared) for worker in (text, exact)]
        assert [report.exactness for report in reports] == ["TEXT_PREFIX", "DEGRADED"]
        assert reports[1].reason == degraded.reason
    finally:
        await shared.close()
        server.stop()


async def test_a_fleet_of_one_needs_no_indexer(tmp_path: Path) -> None:
    worker_pool = WorkerPool((), lambda _: None)
    worker_pool.add(stub("unix:/a", DESCRIPTION))
    shared = SharedIndex(worker_pool, Router("auto", BlockIndex(0), Random(0)), tmp_path / "none.sock")
    assert shared.feed(worker_pool.clients[0]).reason == ALONE


async def test_indexer_that_cannot_start_leaves_no_socket(tmp_path: Path) -> None:
    class Failing(WorkerPool):
        async def start(self) -> None:
            raise OSError

    worker_pool = Failing((), lambda _: None)
    with pytest.raises(OSError):  # noqa: PT011  it has no words
        await serve_index(worker_pool, tmp_path / "i.sock", (), SourceConfig(), 0)
    assert not (tmp_path / "i.sock").exists()


async def test_a_request_whose_target_has_no_keys_is_malformed(tmp_path: Path) -> None:
    indexer = Indexer(WorkerPool((), lambda _: None), tmp_path / "i.sock")
    for place in (-1, 1):
        asked = FindOverlaps([("a", place)], [(bytes(32), 16, KEYS)])
        with pytest.raises(msgspec.ValidationError):
            indexer.answer(msgspec.msgpack.encode(asked))
    assert msgspec.msgpack.decode(indexer.answer(msgspec.msgpack.encode(FindOverlaps([("a", 0)], asked.keys)))) == [
        [[0, False, 0]],
        [],
    ]
