"""Where a chat would go, and why, for an operator."""

from collections.abc import Mapping

import msgspec

from saccade.gateway.fleet.cache_listener import CacheListener
from saccade.gateway.fleet.dispatch import Preview
from saccade.gateway.fleet.worker_report import exactness, why_excluded
from saccade.gateway.fleet.workers import Fleet
from saccade.routing.policy import Candidate


class PicturePlace(msgspec.Struct, frozen=True):
    """Tokens [start, start + tokens) of the prompt stand for a picture, or for a part of one."""

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
    exactness: str
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
    pictures: list[PicturePlace]
    policy: str
    worker: str
    reason: str
    candidates: list[CandidateReport]
    excluded: list[ExcludedWorker]


def route_report(preview: Preview, fleet: Fleet, listener: CacheListener) -> RouteReport:
    """Return *preview* with what is known of the workers of *fleet*."""
    reasons = {worker.url: why_excluded(worker, fleet) for worker in fleet.clients}
    return RouteReport(
        model=preview.model.name,
        prompt_tokens=len(preview.prompt.token_ids),
        pictures=[PicturePlace(run.start, run.length) for run in preview.prompt.runs],
        policy=preview.policy,
        worker=preview.chosen.name,
        reason=_reason(preview),
        candidates=[_candidate(each, preview, listener) for each in preview.candidates],
        excluded=[ExcludedWorker(url, reason) for url, reason in reasons.items() if reason],
    )


def _candidate(candidate: Candidate, preview: Preview, listener: CacheListener) -> CandidateReport:
    worker = next(each for each in preview.model.workers if each.url == candidate.name)
    known = exactness(worker, listener)
    block_size = (worker.description or preview.model.description).block_size
    return CandidateReport(
        worker=worker.url,
        chosen=candidate == preview.chosen,
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
        "picture_tokens": candidate.picture_tokens,
        "waiting_prefill_tokens": candidate.work.prefill_tokens,
        "decode_blocks": candidate.work.decode_blocks,
        "total": candidate.cost,
    }


def _reason(preview: Preview) -> str:
    """Return what made the choice, for people."""
    if len(preview.candidates) == 1:
        return "the only worker that could take it"
    if preview.policy not in ("auto", "cost"):
        return f"chosen by {preview.policy}; its cost does not matter"
    least = min(each.cost for each in preview.candidates)
    ties = sum(each.cost == least for each in preview.candidates)
    return "the least cost" if ties == 1 else f"one of {ties} with the least cost, at random"
