"""What a gateway knows of a worker, for its operator."""

import time

import msgspec

from saccade.gateway.workers.cache_listener import CacheView
from saccade.gateway.workers.pool import WorkerPool
from saccade.gateway.workers.worker import Worker
from saccade.protocol.description import Role
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Exactness, Level
from saccade.protocol.gateway_calls import Booked
from saccade.routing.breaker import BreakerReport
from saccade.routing.policy import WorkInFlight


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker's caches are known to hold: KV blocks, and boundaries with recurrent states."""

    blocks: int
    states: int


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. *exactness* tells how much of what it holds is known now; *reason* why not all.

    *excluded* tells why it gets no requests, "" where it gets them; *breaker* whether requests to it have failed.
    *load* is what the engine said last, None where it says nothing or is away.
    """

    url: str
    model: str | None
    fingerprint: str | None
    block_size: int | None
    role: Role | None
    ready: bool
    draining: bool
    excluded: str
    breaker: BreakerReport
    exactness: Level
    reason: str
    holdings: Holdings
    booked: Booked
    load: Load | None


def worker_report(worker: Worker, fleet: WorkerPool, listener: CacheView) -> WorkerReport:
    """Return what is known of *worker* now."""
    said, router = worker.description, listener.router
    known = exactness(worker, listener)
    breaker = router.breakers.report(worker.url, time.monotonic())
    work = router.work[worker.url]
    return WorkerReport(
        url=worker.url,
        model=said.model if said else None,
        fingerprint=said.fingerprint.hex() if said else None,
        block_size=said.block_size if said else None,
        role=said.role if said else None,
        ready=worker.ready,
        draining=_drains(worker),
        excluded=why_excluded(worker, fleet) or breaker.reason,
        breaker=breaker,
        exactness=known.level,
        reason=known.reason,
        holdings=Holdings(blocks=listener.num_blocks(worker.url), states=listener.num_states(worker.url)),
        booked=booked(work),
        load=worker.load,
    )


def booked(work: WorkInFlight) -> Booked:
    """Return *work* as it is reported."""
    return Booked(
        requests=work.num_requests,
        prompt_tokens=work.num_prompt_tokens,
        prefill_tokens=work.prefill_tokens,
        decode_blocks=work.decode_blocks,
    )


def exactness(worker: Worker, listener: CacheView) -> Exactness:
    """Return how exactly *worker* is known now: as its kind can be, once all of its reports have arrived."""
    missing = listener.feed(worker).reason
    return Exactness("NONE", missing) if missing else listener.exactness(worker)


def why_excluded(worker: Worker, fleet: WorkerPool) -> str:
    """Return why *worker* is not one of those that get requests for its model, "" where it is."""
    if worker in fleet.leaving:
        return "it was removed, and finishes its requests"
    if _drains(worker):
        return "it drains"
    if not worker.ready or worker.description is None:
        return "it is not ready"
    model = fleet.model(worker.description.model)
    if worker not in model.workers:
        difference = fleet.releases.difference(worker.description, model.description)
        return f"it serves another release of its model than the first worker: {difference}"
    return ""


def _drains(worker: Worker) -> bool:
    return worker.load is not None and worker.load.draining
