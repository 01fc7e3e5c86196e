"""Applies a step's results: marks images as encoded, gives sequences their tokens, and ends complete ones.

`scheduling` has chosen the step's work.
"""

import time
from collections.abc import Collection
from collections.abc import Sequence as Ordered
from itertools import chain, islice

import structlog

from saccade.engine.core.images import EncoderKey
from saccade.engine.core.non_finite import MESSAGE
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Proposal
from saccade.engine.core.step import NonFinite, StepOutput
from saccade.engine.core.step_builder import PlannedStep
from saccade.errors import InternalError, InvalidValue, NonFiniteOutput
from saccade.protocol.kv_transfer import SendKv
from saccade.protocol.output import FinishReason, TokenLogprob

logger = structlog.get_logger(__name__)


def take_results(scheduler: Scheduler, schedule: Schedule, plan: PlannedStep, output: StepOutput) -> None:
    """Apply a step's results: mark images as encoded, give sequences their tokens, and end complete ones.

    Sequences that have ended since the step was planned get nothing.
    """
    now = time.perf_counter()
    _take_encoded(scheduler, schedule, output)
    _drop_non_finite(scheduler, plan, output.non_finite)
    for sequence, logprobs in zip(plan.prompts, output.prompt_logprobs, strict=bool(output.prompt_logprobs)):
        sequence.prompt_logprobs = (sequence.prompt_logprobs or []) + logprobs
    logprobs_of = output.logprobs or [None] * len(output.token_ids)
    drafts = dict(zip(plan.step.drafts, output.drafts, strict=bool(output.drafts)))
    draft_of = (drafts.get(draw, ()) for draw in range(len(plan.drawing)))
    results = zip(plan.drawing, output.token_ids, logprobs_of, draft_of, strict=bool(output.token_ids))
    added = []
    for sequence, token_id, logprob, draft in results:
        proposal = schedule.proposals.get(sequence)
        further = () if proposal is None else tuple(islice(results, len(proposal.token_ids)))
        if sequence.finish_reason is not None:
            continue
        if sequence.num_generated_tokens == 0:
            sequence.clock.first_token = now
            # Before the encoder outputs are unpinned that the request's other samples also need.
            scheduler.start_samples(sequence)
        scores, reason = [logprob], sequence.append(token_id)
        sequence.draft = draft if sequence.shares_state else ()
        if proposal is not None:
            reason = _accept(scheduler, sequence, proposal, further, scores, reason)
        added.append((sequence, scores, reason))
    if num_tokens := scheduler.land(schedule):
        scheduler.counters.count_step(num_tokens)
    scheduler.counters.batch_seconds_total += output.batch_seconds
    scheduler.counters.network_seconds_total += output.network_seconds
    for sequence, scores, reason in added:
        scheduler.counters.generated_tokens_total += len(scores)
        if not scheduler.kv_connector.keep(sequence, scores[-1], reason, now):
            scheduler.answer(sequence, scores, reason, now)
        if sequence.matcher is not None and reason is None:
            try:
                sequence.mask = sequence.matcher.mask()
            except InvalidValue as error:
                logger.warning("cut an answer short", request_id=sequence.request_id, reason=error.message)
                scheduler.end_sequence(sequence, FinishReason.LENGTH)


def _accept(
    scheduler: Scheduler,
    sequence: Sequence,
    proposal: Proposal,
    draws: Ordered[tuple[Sequence, int, TokenLogprob | None, tuple[int, ...]]],
    scores: list[TokenLogprob | None],
    reason: FinishReason | None,
) -> FinishReason | None:
    """Add draws to *sequence* while its last token is the proposed one and does not end the answer.

    Add the draws' log probabilities to *scores*, and return why the answer ends with the last draw, or None.
    """
    for proposed_id, (_, token_id, logprob, draft) in zip(proposal.token_ids, draws, strict=True):
        if reason is not None or sequence.token_ids[-1] != proposed_id:
            break
        scores.append(logprob)
        reason, sequence.draft = sequence.append(token_id), draft
    if scheduler.speculation is not None:
        scheduler.speculation.note(sequence, len(scores) - 1)
    scheduler.counters.count_draft(len(proposal.token_ids), len(scores) - 1)
    return reason


def _take_encoded(scheduler: Scheduler, schedule: Schedule, output: StepOutput) -> None:
    """Record which images were encoded, and fail the requests that need an image that could not be encoded."""
    cache = scheduler.encoder_scheduler.encoder_cache
    ids = scheduler.encoder_scheduler.encoded_by(schedule)
    scheduler.encoder_scheduler.launched.difference_update(ids.values())
    failed = [ids[output_id] for output_id in output.failed_encodings if output_id in ids]
    non_finite = [ids[output_id] for output_id in output.non_finite.encodings if output_id in ids]
    encoded = [key for key in ids.values() if key not in (*failed, *non_finite)]
    for key in encoded:
        cache.complete(key)
        scheduler.counters.encoded_items_total += 1
        scheduler.counters.encoded_patches_total += scheduler.encoder_scheduler.costs.patches(key.grid)
    scheduler.counters.encode_seconds_total += output.encode_seconds
    for sequence in [one for one in scheduler.running if one.needs(schedule.images)] if schedule.images else ():
        sequence.clock.encode_seconds += output.encode_seconds
    if failed:
        waiting = _forget_images(scheduler, failed)
        logger.error("encoding failed", request_ids=sorted({sequence.request_id for sequence in waiting}))
        for sequence in waiting:
            scheduler.fail(sequence, InternalError("The model failed on an image of this request."))
    for sequence in _forget_images(scheduler, non_finite) if non_finite else ():
        _fail_non_finite(scheduler, sequence, "image")


def _forget_images(scheduler: Scheduler, keys: Collection[EncoderKey]) -> list[Sequence]:
    """Forget images that could not be encoded, and return the sequences that need them."""
    waiting = [sequence for sequence in scheduler.running if sequence.needs(keys)]
    scheduler.encoder_scheduler.abandon(keys)
    return waiting


def _drop_non_finite(scheduler: Scheduler, plan: PlannedStep, non_finite: NonFinite) -> None:
    """Fail the requests whose values are not finite, and stop the reuse of everything computed with these values.

    If only drafts are not finite, an answer goes on without drafts, unless its state is sent to another engine.
    """
    for number in non_finite.chunks:
        _fail_non_finite(scheduler, plan.owners[number], "hidden states or logits")
    for sequence in [plan.owners[number] for number in non_finite.drafts]:
        if isinstance(sequence.request.kv_transfer, SendKv):
            _fail_non_finite(scheduler, sequence, "draft layer")
        elif sequence.finish_reason is None and sequence.shares_state:
            _note_non_finite(scheduler, sequence, "draft layer")


def _fail_non_finite(scheduler: Scheduler, sequence: Sequence, place: str) -> None:
    if sequence.finish_reason is not None:
        return
    _note_non_finite(scheduler, sequence, place)
    scheduler.fail(sequence, NonFiniteOutput(MESSAGE))
    for image in sequence.images:
        scheduler.encoder_scheduler.encoder_cache.forget_image(image.key)


def _note_non_finite(scheduler: Scheduler, sequence: Sequence, place: str) -> None:
    """Log the fault, and stop the reuse of everything that *sequence* has computed or read: the cause may be in it."""
    scheduler.counters.non_finite_requests_total += 1
    scheduler.non_finite_log.note(sequence.request_id, place)
    blocks = scheduler.block_manager.forget_sequence(sequence)
    # One that was admitted and has not begun would resume from them, and its checkpoint is gone: it begins again.
    for other in [one for one in scheduler.running if one.row is None and not blocks.isdisjoint(one.block_table)]:
        scheduler.preempt(other)
    if blocks:
        samples = chain.from_iterable(scheduler.receiving.values())
        for other in chain(scheduler.running, scheduler.sending, samples):
            other.shares_state &= blocks.isdisjoint(other.block_table)
