"""The board: what happens at a gateway now, as one value for a page and for `saccade top`."""

import itertools
from collections.abc import Sequence

import msgspec

from saccade.gateway.apis.openapi import server_version
from saccade.gateway.server.access_log import MAX_ERRORS
from saccade.gateway.tenants.report import TenantReport
from saccade.gateway.workers.report import WorkerReport
from saccade.protocol.gateway_calls import RequestError, Work


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """What happens at a gateway at *time*, in seconds since 1970, in all of its *num_processes*.

    *num_requests* are being served; *num_waiting* of them wait because every worker has all that it may have. Hit rates
    are shares from 0 to 1 since the engines began, of prompt tokens and of images; None if there were none. Rates per
    second follow from two boards: the fields of a worker's load that end in `_total` only grow. *errors* are the last
    requests that were refused or failed, newest first.
    """

    version: str
    time: float
    num_processes: int
    num_requests: int
    num_waiting: int
    prefix_hit_rate: float | None
    encoder_hit_rate: float | None
    workers: Sequence[WorkerReport]
    tenants: Sequence[TenantReport]
    errors: Sequence[RequestError]


def board(
    time: float, workers: Sequence[WorkerReport], tenants: Sequence[TenantReport], works: Sequence[Work]
) -> Board:
    """Return the board of the processes with *works*."""
    loads = [worker.load for worker in workers if worker.load is not None]
    hits = sum(load.encoder_cache_hits_total for load in loads)
    cached_tokens = sum(load.cached_tokens_total for load in loads)
    errors = itertools.chain.from_iterable(work.errors for work in works)
    return Board(
        version=server_version(),
        time=time,
        num_processes=len(works),
        num_requests=sum(work.num_requests for work in works),
        num_waiting=sum(work.num_waiting for work in works),
        prefix_hit_rate=_share(cached_tokens, sum(load.prompt_tokens_total for load in loads)),
        encoder_hit_rate=_share(hits, hits + sum(load.encoded_items_total for load in loads)),
        workers=workers,
        tenants=tenants,
        errors=sorted(errors, key=lambda error: error.time, reverse=True)[:MAX_ERRORS],
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
