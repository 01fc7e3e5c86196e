"""Reports for operators: what the gateway knows about each worker, and where a chat would go and why."""

import time
from collections.abc import Mapping

import msgspec

from saccade.connectors.worker_state import WorkerState
from saccade.fleet.breaker import BreakerReport
from saccade.fleet.cost import DECODE_BLOCKS, PREFILL_TOKENS, Candidates, WorkInFlight
from saccade.fleet.dispatch import Preview
from saccade.fleet.pool import WorkerPool
from saccade.fleet.prompt import Prompt, refusal
from saccade.fleet.router import RoutingChoice
from saccade.fleet.shared import CacheView, exactness
from saccade.fleet.traffic import ORDINARY, WorkerTraffic
from saccade.fleet.worker import Worker
from saccade.protocol.description import Role
from saccade.protocol.engine_load import Load
from saccade.protocol.exactness import Level
from saccade.protocol.gateway_calls import Booked

NO_ROOM = "it has all the requests that it may have"
GOES_ON = "it is a decode worker, which continues after a prefill worker"
CORDONED = "it is cordoned"
NO_CANARY = "the conversation belongs to the share of a canary"
CANARY = "it is a canary, and the conversation does not belong to its share"


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """How much a worker's caches are known to hold: KV blocks, and boundaries with a recurrent or a window's state."""

    blocks: int
    states: int


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. *exactness* says how much is known about its caches now, and *reason* why not everything is.

    *excluded* says why it gets no requests, or is "" if it gets them; *breaker* says whether requests to it have
    failed. *load* is the engine's last report, or None if it reports nothing or is away. *traffic* is what its operator
    lets it have.
    """

    url: str
    model: str | None
    fingerprint: str | None
    block_size: int | None
    role: Role | None
    version: str | None
    kv_transfer_address: str | None
    ready: bool
    draining: bool
    excluded: str
    breaker: BreakerReport
    exactness: Level
    reason: str
    holdings: Holdings
    booked: Booked
    load: Load | None
    traffic: WorkerTraffic = ORDINARY


def worker_report(worker: Worker, worker_pool: WorkerPool, cache_view: CacheView) -> WorkerReport:
    """Return the report of *worker* as of now."""
    state, router = worker.state, cache_view.router
    description = state.description
    known, feed = exactness(worker, cache_view), cache_view.feed(worker)
    breaker = router.breakers.report(worker.url, time.monotonic())
    work = router.work_of(worker.url)
    return WorkerReport(
        url=worker.url,
        model=description.model if description else None,
        fingerprint=description.fingerprint.hex() if description else None,
        block_size=description.block_size if description else None,
        role=description.role if description else None,
        version=description.version if description else None,
        kv_transfer_address=description.kv_transfer_address if description else None,
        ready=state.ready,
        draining=_drains(state),
        excluded=why_excluded(worker, worker_pool) or breaker.reason,
        breaker=breaker,
        exactness=known.level,
        reason=known.reason,
        holdings=Holdings(blocks=feed.num_blocks, states=feed.num_states),
        booked=booked(work),
        load=state.load,
        traffic=worker_pool.traffic.of(worker.url),
    )


def booked(work: WorkInFlight) -> Booked:
    """Return *work* in the form of a report."""
    return Booked(
        requests=work.num_requests,
        prompt_tokens=work.num_prompt_tokens,
        prefill_tokens=work.prefill_tokens,
        decode_blocks=work.decode_blocks,
    )


def why_excluded(worker: Worker, worker_pool: WorkerPool) -> str:
    """Return why *worker* gets no requests for its model, or "" if it gets them."""
    state = worker.state
    if worker in worker_pool.leaving:
        return "it was removed, and finishes its requests"
    if _drains(state):
        return "it drains"
    if not state.ready or state.description is None:
        return f"it is not ready: {state.loss}" if state.loss else "it is not ready"
    if worker_pool.traffic.of(worker.url).cordoned:
        return CORDONED
    model = worker_pool.model(state.description.model)
    if worker not in model.workers:
        difference = worker_pool.releases.difference(state.description, model.description)
        return f"it serves another release of its model than the first worker: {difference}"
    return ""


def _drains(state: WorkerState) -> bool:
    return state.load is not None and state.load.draining


class ImagePlace(msgspec.Struct, frozen=True):
    """Tokens [start, start + tokens) of the prompt stand for an image or a part of one."""

    start: int
    tokens: int


class CandidateReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that could take the prompt.

    The prompt has *num_blocks* reusable blocks. The worker has reported *overlap_blocks* of them, *overlap_tokens*
    long; with pending requests it will hold *held_tokens*. *cost* has the terms and their *total*, in tokens; in it the
    prompt's and its images' tokens count *recompute_weight* times, and all is divided by the worker's *weight*. *share*
    is that of a canary.
    """

    worker: str
    chosen: bool
    exactness: Level
    exactness_reason: str
    block_size: int
    num_blocks: int
    overlap_blocks: int
    overlap_tokens: int
    held_tokens: int
    cost: Mapping[str, float]
    recompute_weight: float
    weight: float
    share: float | None


class ExcludedWorker(msgspec.Struct, frozen=True):
    """A worker that is not a candidate, and why."""

    worker: str
    reason: str


class RouteReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where a chat would go now. *reason* says why *worker* was chosen."""

    model: str
    prompt_tokens: int
    images: list[ImagePlace]
    policy: str
    worker: str
    reason: str
    candidates: list[CandidateReport]
    excluded: list[ExcludedWorker]


def route_report(preview: Preview, worker_pool: WorkerPool, cache_view: CacheView) -> RouteReport:
    """Return *preview* as a report, with the state of the workers in *worker_pool*."""
    return RouteReport(
        model=preview.model.name,
        prompt_tokens=len(preview.prompt.token_ids),
        images=[ImagePlace(run.start, run.length) for run in preview.prompt.runs],
        policy=preview.choice.policy,
        worker=preview.choice.worker,
        reason=_reason(preview.choice),
        candidates=[_candidate(place, preview, cache_view) for place in range(len(preview.choice.workers))],
        excluded=_excluded(preview, worker_pool, cache_view),
    )


def _excluded(preview: Preview, worker_pool: WorkerPool, cache_view: CacheView) -> list[ExcludedWorker]:
    """Return the workers of the model that are not candidates, and why."""
    candidates = frozenset(preview.choice.workers)
    traffic = preview.model.traffic
    is_drawn = traffic.of(preview.choice.worker).is_canary
    others = [worker for worker in worker_pool.clients if worker.url not in candidates]
    reports = [(worker, worker_report(worker, worker_pool, cache_view)) for worker in others]

    def reason(worker: Worker, report: WorkerReport) -> str:
        if report.excluded or report.role == "decode":
            return report.excluded or GOES_ON
        is_canary = traffic.of(worker.url).is_canary
        side = "" if is_canary == is_drawn else CANARY if is_canary else NO_CANARY
        return _refused(worker, preview.prompt) or side or NO_ROOM

    return [
        ExcludedWorker(report.url, reason(worker, report))
        for worker, report in reports
        if report.model in (None, preview.model.name)
    ]


def _refused(worker: Worker, prompt: Prompt) -> str:
    error = refusal(worker.state, prompt)
    return f"it cannot serve this request: {error.message}" if error is not None else ""


def _candidate(place: int, preview: Preview, cache_view: CacheView) -> CandidateReport:
    """Return the report of the candidate at *place*."""
    choice, candidates = preview.choice, preview.choice.candidates
    worker = next(each for each in preview.model.workers if each.url == choice.workers[place])
    overlap_tokens = int(candidates.overlap_tokens[place])
    known = exactness(worker, cache_view)
    block_size = (worker.state.description or preview.model.description).block_size
    return CandidateReport(
        worker=worker.url,
        chosen=place == choice.place,
        exactness=known.level,
        exactness_reason=known.reason,
        block_size=block_size,
        num_blocks=(len(preview.prompt.token_ids) - 1) // block_size,
        overlap_blocks=overlap_tokens // block_size,
        overlap_tokens=overlap_tokens,
        held_tokens=int(candidates.held_tokens[place]),
        cost=_terms(candidates, place),
        recompute_weight=candidates.recompute_weight,
        weight=float(candidates.weights[place]),
        share=preview.model.traffic.of(worker.url).share,
    )


def _terms(candidates: Candidates, place: int) -> dict[str, float]:
    columns = {
        "prompt_tokens": candidates.prompt_tokens,
        "image_tokens": candidates.image_tokens,
        "waiting_prefill_tokens": candidates.work[PREFILL_TOKENS],
        "decode_blocks": candidates.work[DECODE_BLOCKS],
        "foreign_tokens": candidates.foreign_tokens,
        "foreign_decode_blocks": candidates.foreign_decode_blocks,
        "total": candidates.costs,
    }
    return {name: column[place].item() for name, column in columns.items()}


def _reason(choice: RoutingChoice) -> str:
    """Return a phrase for people that says what decided the choice."""
    if len(choice.workers) == 1:
        return "the only worker that may get it"
    if choice.policy != "cost":
        return f"chosen by {choice.policy}, whatever the cost"
    costs = choice.candidates.costs.tolist()
    if costs[choice.place] > min(costs):
        return "drawn at random, by cost and temperature"
    ties = costs.count(min(costs))
    return "the least cost" if ties == 1 else f"drawn at random of {ties} with the least cost"
