"""What an operator is told of a worker."""

import asyncio
import logging
from random import Random

import msgspec
import pytest
from fronts import DESCRIPTION
from prometheus_client import CollectorRegistry
from stub_worker import TEXT_PREFIX, draining, stub
from waiting import until

from saccade.fleet.breaker import FAILURES
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex
from saccade.fleet.metrics import RoutingCollector
from saccade.fleet.pool import WorkerPool
from saccade.fleet.report import why_excluded, worker_report
from saccade.fleet.router import Router
from saccade.fleet.traffic import FleetTraffic, WorkerTraffic


def test_every_reason_has_its_words() -> None:
    other = msgspec.structs.replace(DESCRIPTION, fingerprint=b"other".ljust(32))
    expected = {
        stub("unix:/first", DESCRIPTION): "",
        stub("unix:/equal", DESCRIPTION): "",
        stub("unix:/cordoned", DESCRIPTION): "it is cordoned",
        stub("unix:/away", DESCRIPTION, ready=False): "it is not ready",
        stub("unix:/new", None): "it is not ready",
        stub("unix:/wrong", None, loss="the token is wrong"): "it is not ready: the token is wrong",
        draining("unix:/leaving", DESCRIPTION): "it drains",
        stub("unix:/other", other): "it serves another release of its model than the first worker: weights",
        stub("unix:/else", msgspec.structs.replace(other, model="else")): "",
    }
    worker_pool = WorkerPool((), lambda _: None)
    for worker in expected:
        worker_pool.add(worker)
    worker_pool.direct(FleetTraffic({"unix:/cordoned": WorkerTraffic(cordoned=True)}))
    assert {worker.url: why_excluded(worker, worker_pool) for worker in worker_pool.clients} == {
        worker.url: reason for worker, reason in expected.items()
    }


async def test_a_worker_is_never_called_more_exact_than_its_kind(caplog: pytest.LogCaptureFixture) -> None:  # E5
    caplog.set_level(logging.INFO)
    text, exact = stub("unix:/text", DESCRIPTION, exactness=TEXT_PREFIX), stub("unix:/exact", DESCRIPTION)
    worker_pool = WorkerPool((), lambda _: None)
    listener = CacheListener(worker_pool, Router("auto", BlockIndex(1 << 20), Random(0)))
    for worker in (text, exact):
        worker_pool.add(worker)
    worker_pool.changed(text)
    await asyncio.sleep(0)
    try:
        await until(lambda: all(not listener.feed(worker).reason for worker in worker_pool.clients))
        registry = CollectorRegistry()
        registry.register(RoutingCollector(worker_pool, listener))
        said = {}
        for worker in worker_pool.clients:
            report = worker_report(worker, worker_pool, listener)
            labels = {"worker": worker.url, "reason": report.reason}
            said[worker.url] = (report.exactness, registry.get_sample_value("saccade_router_exact", labels))
        assert said == {"unix:/text": ("TEXT_PREFIX", 0), "unix:/exact": ("EXACT", 1)}
        assert f"worker unix:/text are TEXT_PREFIX: {TEXT_PREFIX.reason}" in caplog.text
        assert "worker unix:/exact are EXACT" in caplog.text
    finally:
        await listener.close()


async def test_a_breaker_is_shown_with_its_reason() -> None:
    worker = stub("unix:/a", DESCRIPTION)
    worker_pool = WorkerPool((), lambda _: None)
    worker_pool.add(worker)
    listener = CacheListener(worker_pool, Router("auto", BlockIndex(1 << 20), Random(0)))
    (client,) = worker_pool.clients
    report = worker_report(client, worker_pool, listener)
    assert (report.breaker.state, report.excluded) == ("closed", "")
    for _ in range(FAILURES):
        listener.router.breakers.failed(worker.url, "it hangs", now=1e9)
    report = worker_report(client, worker_pool, listener)
    assert report.breaker.state == "open"
    assert "it hangs" in report.excluded
