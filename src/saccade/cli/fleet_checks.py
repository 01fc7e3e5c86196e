"""The checks of `saccade doctor` on a running fleet, based on what a gateway knows of its workers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from random import Random
from urllib.parse import urlsplit

import msgspec

from saccade.cli.admin_port import read_answer
from saccade.cli.machine_checks import Finding, State
from saccade.fleet.feed import ALONE, CacheListener
from saccade.fleet.index import BlockIndex
from saccade.fleet.pool import WorkerPool
from saccade.fleet.report import CORDONED, WorkerReport, worker_report
from saccade.fleet.router import Router
from saccade.fleet.settings import RoutingSettings
from saccade.fleet.shared import exactness
from saccade.supervisor.tree import until
from saccade.transport.credentials import WorkerCredentials
from saccade.transport.kv_transfer.channel import NONCE_BYTES
from saccade.transport.unreachable import why_unreachable

FEED_SECONDS = 15.0
"""How long workers may take to connect, and to send what they hold."""

CONNECT_SECONDS = 5.0
TLS_SCHEMES = ("grpcs", "vllms")


class _Workers(msgspec.Struct):
    """The answer to GET /workers."""

    workers: list[WorkerReport]


def reports_of_gateway(gateway: str, admin_key: str) -> list[WorkerReport]:
    """Return what the gateway with the admin port *gateway*, a URL, knows of its workers. Raises StartupError."""
    return read_answer(gateway, "/workers", admin_key, _Workers, "saccade doctor").workers


async def reports_of_workers(urls: Sequence[str], credentials: WorkerCredentials) -> list[WorkerReport]:
    """Return what a gateway would know of the workers at *urls*. Raises StartupError for a malformed URL."""
    pool = WorkerPool(urls, lambda _: None, credentials=credentials)
    view = CacheListener(pool, Router("cost", BlockIndex(RoutingSettings().routing_index_bytes), Random()))

    async def settled() -> bool:
        return all(one.state.ready and exactness(one, view).reason in ("", ALONE) for one in pool.clients)

    await pool.start()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FEED_SECONDS):
                await until(settled)
        reports = [worker_report(worker, pool, view) for worker in pool.clients]
    finally:
        await view.close()
        await pool.close()
    faults = [None if report.ready else await connection_fault(report.url, credentials) for report in reports]
    return [
        report if fault is None else msgspec.structs.replace(report, excluded=fault)
        for report, fault in zip(reports, faults, strict=True)
    ]


async def connection_fault(url: str, credentials: WorkerCredentials) -> str | None:
    """Return why this machine cannot connect to the worker at *url*, or None if it can. A socket is not tried."""
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        return None
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            tls = credentials.tls_context() if parts.scheme in TLS_SCHEMES else None
            _, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
            writer.close()
    except OSError as error:
        return why_unreachable(url, error, "Start the worker, or correct the address.", "--worker-tls-ca ca.pem")
    return None


async def check_fleet(reports: Sequence[WorkerReport]) -> AsyncIterator[Finding]:
    """Yield the findings about each worker, and about each model's workers together."""
    if not reports:
        yield Finding("workers", "failed", "there are none", "Look at the gateway's list of workers.")
    for report in reports:
        yield _of_worker(report)
        if report.ready and report.reason != ALONE:
            why = f": {report.reason}" if report.reason else ""
            state: State = "ok" if report.exactness == "EXACT" else "warning"
            yield Finding(report.url, state, f"what it holds is known to the level {report.exactness}{why}")
        if report.kv_transfer_address is not None:
            yield await check_transfers(report.url, report.kv_transfer_address)
    serving = [report for report in reports if not report.excluded]
    for name in dict.fromkeys(str(report.model) for report in serving):
        yield _of_model(name, [report for report in serving if report.model == name])


def _of_worker(report: WorkerReport) -> Finding:
    if report.draining:
        return Finding(report.url, "warning", "it drains", "Start it again when its requests have ended.")
    if report.excluded == CORDONED:
        return Finding(report.url, "warning", CORDONED, "Clear that when it may get requests again: PATCH /workers.")
    if report.excluded:
        fix = "Look at its log, and compare its address, token and files with those of the others."
        return Finding(report.url, "failed", report.excluded, fix)
    return Finding(report.url, "ok", f"it serves {report.model}, version {report.version}, role {report.role}")


def _of_model(name: str, workers: Sequence[WorkerReport]) -> Finding:
    """Return whether the *workers* of the model *name* fit together.

    Workers with another release were excluded before.
    """
    roles, versions = {worker.role for worker in workers}, {str(worker.version) for worker in workers}
    if "both" not in roles and len(roles) == 1:
        missing = "decode" if "prefill" in roles else "prefill"
        return Finding(name, "failed", f"there is no {missing} worker", f"Start one with --role {missing}.")
    if len(versions) > 1:
        return Finding(name, "warning", f"its workers have versions {', '.join(sorted(versions))}", "Upgrade them all.")
    return Finding(name, "ok", f"{len(workers)} workers serve the same release")


async def check_transfers(name: str, address: str) -> Finding:
    """Return whether this machine reaches *address*, host:port, from which decode workers fetch the KV state."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            with contextlib.closing(writer):
                await reader.readexactly(NONCE_BYTES)
    except (OSError, EOFError, TimeoutError, ValueError):
        fix = "--kv-transfer-bind must name an address that decode workers reach; open its port in firewalls."
        return Finding(name, "failed", f"its KV transfers at {address} cannot be reached from here", fix)
    return Finding(name, "ok", f"its KV transfers at {address} can be reached")
