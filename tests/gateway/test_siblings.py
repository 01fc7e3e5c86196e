"""What a gateway process says for all processes that share its port."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families
from tables import table
from waiting import until

from saccade.fleet.settings import DispatchLimits
from saccade.gateway.config import ConnectionLimits, GatewayConfig, Member
from saccade.gateway.siblings import Siblings
from saccade.gateway.tenants.account import Account, Limits, Tenant
from saccade.gateway.tenants.report import TENANT_LABEL, tenant_reports
from saccade.protocol.gateway_calls import Booked, TenantUsage, Work, total


class Process:
    """A gateway process that serves *number* requests more than one."""

    def __init__(self, member: Member) -> None:
        self.number = member.number
        self.has_media = True
        self.registry, shared = CollectorRegistry(), CollectorRegistry()
        Counter("asked", "Requests.", ("route",), registry=self.registry).labels("/x").inc(member.number + 1)
        Gauge("engine", "The same in all processes.", registry=shared).set(7)
        self.siblings = Siblings(member, self.work, self.forget, self.registry, shared, self.usages)

    def work(self) -> Work:
        booked = Booked(requests=self.number, prompt_tokens=10, prefill_tokens=5, decode_blocks=1)
        return Work(self.number + 1, {"unix:/a": booked})

    def usages(self) -> dict[str, TenantUsage]:
        return {"acme": TenantUsage(requests=self.number, prompt_tokens=10)}

    def forget(self) -> None:
        self.has_media = False


@contextlib.asynccontextmanager
async def processes(folder: Path, size: int) -> AsyncIterator[list[Process]]:
    """All processes of a gateway, without an indexer."""
    running = [Process(Member(folder, number, size)) for number in range(size)]
    for process in running:
        await process.siblings.start()
    try:
        yield running
    finally:
        for process in running:
            await process.siblings.close()


async def num_reached(process: Process) -> int:
    return len(await process.siblings.works())


async def all_reached(running: list[Process]) -> None:
    for process in running:
        while await num_reached(process) < len(running):
            pass


def samples(page: bytes) -> dict[tuple[str, str | None], float]:
    """Every sample of *page* by name and process, but for times of creation."""
    return {
        (sample.name, sample.labels.get("gateway_process")): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def test_every_process_shows_the_metrics_of_all_and_sums_none(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as running:
        await all_reached(running)
        expected = {("asked_total", str(number)): number + 1 for number in range(3)} | {("engine", None): 7}
        for process in running:
            assert samples(await process.siblings.metrics()) == expected
        await running[2].siblings.close()
        del expected["asked_total", "2"]
        assert samples(await running[0].siblings.metrics()) == expected


@table("size", [1, 2])
async def test_metrics_can_be_without_those_of_tenants(size: int, tmp_path: Path) -> None:
    async with processes(tmp_path, size) as running:
        alone = Siblings(None, running[0].work, running[0].forget, running[0].registry, CollectorRegistry(), dict)
        subject = alone if size == 1 else running[0].siblings
        Counter("used", "Tokens.", (TENANT_LABEL,), registry=running[0].registry).labels("acme").inc()
        await all_reached(running)
        assert b"acme" in await subject.metrics()
        page = await subject.metrics(with_tenants=False)
        assert b"asked_total{" in page
        assert b"acme" not in page
        assert b"used" not in page


async def test_work_is_that_of_all_processes(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as running:
        await all_reached(running)
        works = await running[1].siblings.works()
        assert sum(work.num_requests for work in works) == 1 + 2 + 3
        assert total(Booked, [work.booked["unix:/a"] for work in works]) == Booked(
            requests=3, prompt_tokens=30, prefill_tokens=15, decode_blocks=3
        )


async def test_usage_is_that_of_all_processes(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as running:
        await all_reached(running)
        usages = await running[1].siblings.usages()
        account = Account(Tenant(name="acme", limits=Limits(tokens=7)))
        (report,) = tenant_reports({"acme": account}, usages)
        assert (report.usage, report.tokens_per_minute) == (TenantUsage(requests=0 + 1 + 2, prompt_tokens=30), 7)


async def test_caches_of_all_processes_are_emptied_and_those_that_are_away_are_named(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as running:
        await all_reached(running)
        assert await running[0].siblings.forget_media() == []
        assert not any(process.has_media for process in running)
        await running[1].siblings.close()
        await until(lambda: not Member(tmp_path, 1, 3).own.exists())
        assert await running[0].siblings.forget_media() == ["1"]


def test_limits_are_for_all_processes_together() -> None:
    """Each has its part, rounded up; what is 0 stays 0."""
    whole = GatewayConfig(
        max_requests=5,
        max_request_memory_bytes=8,
        num_decode_processes=3,
        shared_memory_bytes=100,
        mm_processor_cache_gb=0,
        url_cache_bytes=11,
        connections=ConnectionLimits(max_connections=7, max_per_address=1),
        dispatch=DispatchLimits(worker_queue=64, max_waiting=9),
        api_keys=("a", "b"),
    )
    part = whole.shared(Member(Path("/x"), 1, 2))
    assert (part.max_requests, part.max_request_memory_bytes, part.num_decode_processes) == (3, 4, 2)
    assert (part.shared_memory_bytes, part.image_cache_bytes, part.url_cache_bytes) == (50, 0, 6)
    assert (part.connections.max_connections, part.connections.max_per_address) == (4, 1)
    assert (part.dispatch.max_waiting, part.dispatch.num_processes, part.dispatch.worker_queue) == (5, 2, 64)
    assert part.max_tenant_requests < whole.max_tenant_requests
    assert (part.member, part.port, part.max_body_bytes) == (Member(Path("/x"), 1, 2), whole.port, whole.max_body_bytes)
