"""Where a chat would go, and why, for an operator."""

from collections.abc import Mapping

import msgspec

from saccade.gateway.workers.cache_listener import CacheView
from saccade.gateway.workers.dispatch import Preview, Prompt
from saccade.gateway.workers.pool import WorkerPool
from saccade.gateway.workers.worker import Worker, refusal
from saccade.gateway.workers.worker_report import exactness, worker_report
from saccade.protocol.exactness import Level
from saccade.routing.policy import Candidate
from saccade.routing.router import RoutingChoice

NO_ROOM = "it has all the requests that it may have"
GOES_ON = "it is a decode worker, which goes on behind a prefill worker"


class ImagePlace(msgspec.Struct, frozen=True):
    """Tokens [start, start + tokens) of the prompt stand for an image, or for a part of one."""

    start: int
    tokens: int


class CandidateReport(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that could take the prompt.

    Of the prompt's *num_blocks* blocks that could be reused, the worker has reported to hold *overlap_blocks*, which
    are *overlap_tokens*; with what is expected of it, it holds *held_tokens*. *cost* has the terms and their *total*,
    in tokens.
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


class ExcludedWorker(msgspec.Struct, frozen=True):
    """A worker that is not looked at, and why."""

    worker: str
    reason: str


class RouteReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where a chat would go now. *reason* tells what made *worker* the choice."""

    model: str
    prompt_tokens: int
    pictures: list[ImagePlace]
    policy: str
    worker: str
    reason: str
    candidates: list[CandidateReport]
    excluded: list[ExcludedWorker]


def route_report(preview: Preview, fleet: WorkerPool, listener: CacheView) -> RouteReport:
    """Return *preview* with what is known of the workers of *fleet*."""
    return RouteReport(
        model=preview.model.name,
        prompt_tokens=len(preview.prompt.token_ids),
        pictures=[ImagePlace(run.start, run.length) for run in preview.prompt.runs],
        policy=preview.choice.policy,
        worker=preview.choice.chosen.name,
        reason=_reason(preview.choice),
        candidates=[_candidate(each, preview, listener) for each in preview.choice.candidates],
        excluded=_excluded(preview, fleet, listener),
    )


def _excluded(preview: Preview, fleet: WorkerPool, listener: CacheView) -> list[ExcludedWorker]:
    """Return the workers of the model that are no candidates, and why."""
    candidates = {candidate.name for candidate in preview.choice.candidates}
    others = [worker for worker in fleet.clients if worker.url not in candidates]
    reports = [(worker, worker_report(worker, fleet, listener)) for worker in others]
    return [
        ExcludedWorker(
            report.url,
            report.excluded or (GOES_ON if report.role == "decode" else _refused(worker, preview.prompt) or NO_ROOM),
        )
        for worker, report in reports
        if report.model in (None, preview.model.name)
    ]


def _refused(worker: Worker, prompt: Prompt) -> str:
    error = refusal(worker, prompt.traits)
    return f"it cannot serve this request: {error.message}" if error is not None else ""


def _candidate(candidate: Candidate, preview: Preview, listener: CacheView) -> CandidateReport:
    worker = next(each for each in preview.model.workers if each.url == candidate.name)
    known = exactness(worker, listener)
    block_size = (worker.description or preview.model.description).block_size
    return CandidateReport(
        worker=worker.url,
        chosen=candidate == preview.choice.chosen,
        exactness=known.level,
        exactness_reason=known.reason,
        block_size=block_size,
        num_blocks=(len(preview.prompt.token_ids) - 1) // block_size,
        overlap_blocks=candidate.overlap_tokens // block_size,
        overlap_tokens=candidate.overlap_tokens,
        held_tokens=candidate.held_tokens,
        cost=_terms(candidate),
    )


def _terms(candidate: Candidate) -> dict[str, float]:
    return {
        "prompt_tokens": candidate.prompt_tokens,
        "picture_tokens": candidate.image_tokens,
        "waiting_prefill_tokens": candidate.work.prefill_tokens,
        "decode_blocks": candidate.work.decode_blocks,
        "foreign_tokens": candidate.foreign_tokens,
        "foreign_decode_blocks": candidate.foreign_decode_blocks,
        "total": candidate.cost,
    }


def _reason(choice: RoutingChoice) -> str:
    """Return what made the choice, for people."""
    if len(choice.candidates) == 1:
        return "the only worker that may get it"
    if choice.policy != "cost":
        return f"chosen by {choice.policy}, whatever the cost"
    costs = [each.cost for each in choice.candidates]
    if choice.chosen.cost > min(costs):
        return "drawn at random, by cost and temperature"
    ties = costs.count(min(costs))
    return "the least cost" if ties == 1 else f"drawn at random of {ties} with the least cost"
