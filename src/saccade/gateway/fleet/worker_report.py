"""What a gateway knows of a worker, for its operator."""

import msgspec

from saccade.gateway.fleet.cache_listener import CacheListener
from saccade.gateway.fleet.worker import Worker
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Level


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker's caches are known to hold: KV blocks, and boundaries with recurrent states."""

    blocks: int
    states: int


class Booked(msgspec.Struct, frozen=True, kw_only=True):
    """What this gateway has sent to the worker and not yet got back.

    *prefill_tokens* are left to compute before first tokens; *decode_blocks* belong to prompts that have theirs.
    """

    requests: int
    prompt_tokens: int
    prefill_tokens: int
    decode_blocks: int


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. *exactness* tells how much of what it holds is known now; *reason* why not all.

    *load* is what the engine said last, None where it says nothing or is away.
    """

    url: str
    model: str | None
    fingerprint: str | None
    block_size: int | None
    ready: bool
    draining: bool
    exactness: Level
    reason: str
    holdings: Holdings
    booked: Booked
    load: Load | None


def worker_report(worker: Worker, listener: CacheListener) -> WorkerReport:
    """Return what is known of *worker* now."""
    said, router = worker.description, listener.router
    reason = listener.feed(worker).reason
    work = router.work[worker.url]
    return WorkerReport(
        url=worker.url,
        model=said.model if said else None,
        fingerprint=said.fingerprint.hex() if said else None,
        block_size=said.block_size if said else None,
        ready=worker.ready,
        draining=worker.load is not None and worker.load.draining,
        exactness="NONE" if reason else worker.exactness.level,
        reason=reason or worker.exactness.reason,
        holdings=Holdings(blocks=router.index.num_blocks(worker.url), states=router.index.num_states(worker.url)),
        booked=Booked(
            requests=work.num_requests,
            prompt_tokens=work.num_prompt_tokens,
            prefill_tokens=work.prefill_tokens,
            decode_blocks=work.decode_blocks,
        ),
        load=worker.load,
    )
