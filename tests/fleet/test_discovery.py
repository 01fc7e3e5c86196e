"""Workers come and go while requests run: who leaves gets nothing new, finishes what it has, and is forgotten."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import structlog
from echo_worker import STALL, ask, serving
from fronts import DESCRIPTION
from prometheus_client import CollectorRegistry, generate_latest
from streams import stream
from waiting import until

from saccade.errors import WorkerFailed
from saccade.fleet.breaker import CLOSED
from saccade.fleet.decision_metrics import DecisionMetrics
from saccade.fleet.dispatch import Dispatcher
from saccade.fleet.feed import CacheListener
from saccade.fleet.index import BlockIndex, Partition
from saccade.fleet.metrics import RoutingCollector
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt
from saccade.fleet.report import why_excluded
from saccade.fleet.router import Router
from saccade.fleet.shared import exactness
from saccade.fleet.sources import Discovery
from saccade.fleet.traffic import ORDINARY, WorkerTraffic
from saccade.protocol.request import EngineRequest
from saccade.transport import lasting_task


@dataclass(frozen=True)
class Gateway:
    """The parts of a gateway that know workers."""

    worker_pool: WorkerPool
    router: Router
    listener: CacheListener
    dispatcher: Dispatcher
    discovery: Discovery
    registry: CollectorRegistry

    @property
    def urls(self) -> set[str]:
        return {client.url for client in self.worker_pool.clients}

    async def answer(self, request: EngineRequest) -> str:
        """Send *request* and return the url of its worker."""
        async with self.dispatcher.place("echo", Prompt(request.token_ids)) as placement:
            async for _ in stream(self.dispatcher, placement, request):
                pass
            return placement.worker.url

    async def list_workers(self, urls: Sequence[str]) -> None:
        """Have the source "file" list *urls*."""
        await self.discovery.replace("file", dict.fromkeys(urls, ORDINARY))

    def metrics(self) -> str:
        return generate_latest(self.registry).decode()


@contextlib.asynccontextmanager
async def gateway(drain_seconds: float = 60.0) -> AsyncIterator[Gateway]:
    worker_pool, registry = WorkerPool((), lambda _: None), CollectorRegistry()
    router = Router("round_robin", BlockIndex(1 << 20), Random(0))
    listener = CacheListener(worker_pool, router)
    metrics = DecisionMetrics(registry, lambda worker: exactness(worker, listener))
    dispatcher = Dispatcher(worker_pool, router, metrics)
    registry.register(RoutingCollector(worker_pool, listener))
    discovery = Discovery(worker_pool, dispatcher.num_requests_at, drain_seconds)
    try:
        yield Gateway(worker_pool, router, listener, dispatcher, discovery, registry)
    finally:
        await discovery.close()
        await listener.close()
        await worker_pool.close()


def folder(root: Path, name: str) -> Path:
    made = root / name
    made.mkdir()
    return made


def url(place: Path) -> str:
    return f"unix:{place}/w.sock"


class Contexts(logging.Handler):
    """Keeps each message with the context of structlog in which it was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, dict[str, object]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.lines[record.getMessage()] = structlog.contextvars.get_contextvars()


async def test_lines_about_a_worker_lack_the_id_of_the_request_that_added_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = folder(tmp_path, "a")
    contexts = Contexts()
    logger = logging.getLogger("saccade.fleet")
    with caplog.at_level(logging.INFO, logger.name), structlog.contextvars.bound_contextvars(request_id="r"):
        logger.addHandler(contexts)
        try:
            async with gateway() as running:
                async with serving(place):
                    await running.discovery.want("POST /workers", url(place))
                    await until(lambda: f"worker {url(place)} is ready" in contexts.lines)
                await until(lambda: f"worker {url(place)} is not ready" in contexts.lines)
        finally:
            logger.removeHandler(contexts)
    assert {line for line, context in contexts.lines.items() if context} == set()


async def test_a_removed_worker_finishes_its_requests_and_is_forgotten(tmp_path: Path) -> None:
    a, b = folder(tmp_path, "a"), folder(tmp_path, "b")
    async with serving(a) as worker, serving(b), gateway() as running:
        worker_pool, router = running.worker_pool, running.router
        await running.list_workers([url(a), url(b)])
        await until(lambda: all(client.state.ready for client in worker_pool.clients))
        await until(lambda: all(not running.listener.feed(client).reason for client in worker_pool.clients))
        first = worker_pool.clients[0]
        stalled = ask("r", [STALL])
        requests = [asyncio.create_task(running.answer(stalled))]
        await until(lambda: first.load and first.load.num_running)
        await running.list_workers([url(b)])
        assert [client.url for client in worker_pool.leaving] == [url(a)]
        assert why_excluded(first, worker_pool) == "it was removed, and finishes its requests"
        assert [await running.answer(ask(f"n{number}", [1])) for number in range(4)] == [url(b)] * 4
        assert first.ready
        assert not requests[0].done()
        requests[0].cancel()  # its client leaves: it was the last request
        await until(lambda: not worker_pool.leaving)
        assert not first.ready
        assert not worker.relay.draining
        await until(lambda: running.urls == {url(b)})
        assert url(a) not in running.metrics()
        assert url(b) in running.metrics()
        assert url(a) not in router.works()
        assert not router.index.is_exact(url(a))
        assert router.breakers.report(url(a), 0.0) == CLOSED
        assert not router.predictions
        await asyncio.gather(*requests, return_exceptions=True)


async def test_holdings_of_a_removed_worker_are_forgotten() -> None:  # E5
    router = Router("auto", BlockIndex(1 << 20), Random(0))
    router.index.begin("a", Partition(DESCRIPTION.fingerprint, 16), resumes_at_states=False)
    row = router.row_of("a")
    router.predictions.add(row, [b"k"], 0.0)
    router.assumptions.add(row, [b"k"], 0.0)
    for number in range(3):
        router.breakers.failed("a", "broken", number)
    assert router.work_of("a").num_requests == 0
    router.forget("a")
    assert router.works() == {}
    assert router.index.num_blocks("a") == 0
    assert not router.predictions.expected(row)
    assert not router.assumptions.expected(row)
    assert router.breakers.report("a", 0.0) == CLOSED


async def test_requests_that_outlive_the_deadline_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b = folder(tmp_path, "a"), folder(tmp_path, "b")
    async with serving(a), serving(b), gateway(drain_seconds=0.1) as running:
        await running.list_workers([url(a)])
        await until(lambda: running.worker_pool.ready)
        first = running.worker_pool.clients[0]
        request = asyncio.create_task(running.answer(ask("r", [STALL])))
        await until(lambda: first.load and first.load.num_running)
        await running.list_workers([])
        with pytest.raises(WorkerFailed):
            await request
        await until(lambda: not running.worker_pool.leaving)
        assert "is removed with 1 unfinished requests" in caplog.text
        assert running.router.works() == {}


async def test_draining_worker_that_returns_keeps_its_requests(tmp_path: Path) -> None:
    a = folder(tmp_path, "a")
    async with serving(a), gateway() as running:
        await running.list_workers([url(a)])
        await until(lambda: running.worker_pool.ready)
        (first,) = running.worker_pool.clients
        request = asyncio.create_task(running.answer(ask("r", [STALL])))
        await until(lambda: first.load and first.load.num_running)
        await running.list_workers([])
        assert running.urls == set()
        await running.list_workers([url(a)])
        assert running.worker_pool.clients == (first,)
        assert running.worker_pool.leaving == ()
        assert not request.done()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        assert await running.answer(ask("n", [1])) == url(a)


async def test_removed_worker_that_returns_serves_again(tmp_path: Path) -> None:
    a = folder(tmp_path, "a")
    async with serving(a), gateway() as running:
        for _ in range(2):
            await running.list_workers([url(a)])
            # The second time the old connection may still be closing; the worker is added when that is over.
            await until(lambda: running.worker_pool.ready)
            assert await running.answer(ask("r", [1])) == url(a)
            await running.list_workers([])
            await asyncio.sleep(0)
        await until(lambda: not running.worker_pool.leaving)


async def test_an_unforeseen_error_does_not_keep_a_worker_from_leaving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting_task, "FIRST_PAUSE_SECONDS", 0.001)
    a = folder(tmp_path, "a")
    errors = [KeyError("unforeseen")]

    async def forget(_: str) -> None:
        if errors:
            raise errors.pop()

    async with serving(a), gateway() as running:
        running.worker_pool.on_forget(forget)
        await running.list_workers([url(a)])
        await until(lambda: running.worker_pool.ready)
        await running.list_workers([])
        await until(lambda: not running.worker_pool.leaving)
        assert [record.levelno for record in caplog.records if record.exc_info] == [logging.CRITICAL]
        await running.list_workers([url(a)])
        await until(lambda: running.worker_pool.ready)


async def test_worker_of_two_sources_stays_until_both_remove_it() -> None:
    async with gateway() as running:
        discovery = running.discovery
        await running.list_workers(["grpc://127.0.0.1:1"])
        await discovery.want("admin", "grpc://127.0.0.1:1")
        await discovery.want("admin", "grpc://127.0.0.1:2")
        assert discovery.sources_of("grpc://127.0.0.1:1") == ("file", "admin")
        assert len(running.worker_pool.clients) == 2
        await discovery.drop("admin", "grpc://127.0.0.1:1")
        assert running.urls == {"grpc://127.0.0.1:1", "grpc://127.0.0.1:2"}
        await running.list_workers([])
        assert running.urls == {"grpc://127.0.0.1:2"}


async def test_half_of_a_pair_waits_for_the_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with gateway() as running:
        await running.list_workers(["sglang://127.0.0.1:1?role=prefill", "grpc://127.0.0.1:2"])
        assert running.urls == {"grpc://127.0.0.1:2"}
        assert "used when both are known" in caplog.text
        await running.discovery.want("admin", "sglang://127.0.0.1:3?role=decode")
        assert len(running.urls) == 2
        await running.discovery.drop("admin", "sglang://127.0.0.1:3?role=decode")
        assert running.urls == {"grpc://127.0.0.1:2"}


async def test_the_traffic_of_a_line_is_that_of_its_workers() -> None:
    async with gateway() as running:
        slow, canary = WorkerTraffic(weight=0.5), WorkerTraffic(share=0.1)
        await running.discovery.replace("file", {"grpc://127.0.0.1:1": slow, "vllm://127.0.0.1:2?ranks=2": canary})
        await running.discovery.want("admin", "grpc://127.0.0.1:1")
        traffic = running.worker_pool.traffic
        assert {url: traffic.of(url) for url in running.urls} == {
            "grpc://127.0.0.1:1": slow,
            "vllm://127.0.0.1:2?rank=0": WorkerTraffic(share=0.05),
            "vllm://127.0.0.1:2?rank=1": WorkerTraffic(share=0.05),
        }
        await running.list_workers(["grpc://127.0.0.1:1"])
        assert running.worker_pool.traffic.of("grpc://127.0.0.1:1") == ORDINARY
