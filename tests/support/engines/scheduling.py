"""A scheduler with integers for tensors: sequences of made-up tokens and images, encoder and network played here."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from fractions import Fraction
from math import prod
from uuid import uuid4

import msgspec

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.encoder_scheduler import EncodeCosts
from saccade.engine.core.images import Until
from saccade.engine.core.kv.blocks import PagedBlocks
from saccade.engine.core.kv.manager import BlockManager
from saccade.engine.core.kv.state_checkpoints import StateCheckpoints
from saccade.engine.core.results import take_results
from saccade.engine.core.schedule import Budgets, Schedule
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.scheduling import schedule_step
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.step import SamplingInput, StepInput, StepOutput
from saccade.engine.core.step_builder import PlannedStep
from saccade.engine.core.step_costs import Allowance
from saccade.models.positions import MultimodalPositions
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK = 4
FEATURE_BYTES = 10


def image(start: int, tokens: int, content: bytes, inline: bytes | None = b"") -> MediaItem:
    """An image of 4 patches a token."""
    return MediaItem(
        modality="image",
        content_hash=content * (32 // len(content)),
        grid=(1, 2, 2 * tokens),
        spans=(Span(start, tokens),),
        pixel_shape=(4 * tokens, 768),
        inline=inline,
    )


def sequence(
    arrival: int,
    length: int,
    images: tuple[tuple[int, int], ...] = (),
    max_tokens: int = 4,
    inline: bytes | None = b"",
    priority: int | msgspec.UnsetType = msgspec.UNSET,
) -> Sequence:
    """A prompt of *length* tokens that no other *arrival* shares; images are (start, tokens), each different."""
    media = tuple(
        image(start, tokens, bytes([arrival % 256, index]), inline) for index, (start, tokens) in enumerate(images)
    )
    return of([arrival] * length, media, arrival, max_tokens, priority=priority)


def of(
    token_ids: Ordered[int],
    media: tuple[MediaItem, ...],
    arrival: int,
    max_tokens: int = 4,
    num_samples: int = 1,
    num_at_once: int | msgspec.UnsetType = msgspec.UNSET,
    priority: int | msgspec.UnsetType = msgspec.UNSET,
    stop_token_ids: tuple[int, ...] = (),
) -> Sequence:
    """Sample 0 of a request for these tokens and images."""
    request = EngineRequest(
        request_id=uuid4().hex,
        token_ids=list(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids),
        media=media,
        num_samples=num_samples,
        num_at_once=num_at_once,
        priority=priority,
    )
    return Sequence(0, request, arrival, 0, b"", MultimodalPositions([]))


def scheduler(
    num_blocks: int = 100,
    seqs: int = 4,
    tokens: int = 16,
    patches: int = 64,
    checkpoints: StateCheckpoints | None = None,
    encoder_cache_bytes: int = 10_000,
    whole_images: bool = False,
    costs: EncodeCosts | None = None,
) -> Scheduler:
    """A scheduler over paged blocks and *checkpoints*; the encoder has one layer unless *costs* say more."""
    blocks = BlockManager(PagedBlocks(num_blocks, BLOCK), checkpoints)
    budgets = Budgets(seqs, tokens, patches, whole_images=whole_images)
    return Scheduler(budgets, blocks, EncoderCache(encoder_cache_bytes), costs or encode_costs())


def encode_costs(num_layers: int = 1, num_parts: int = 1, most_whole: int = 0) -> EncodeCosts:
    """Costs of an encoder with *num_layers*, which encodes every image in *num_parts*."""
    return EncodeCosts(prod, lambda *_: FEATURE_BYTES, num_layers, lambda *_: num_parts, most_whole)


def paged(subject: Scheduler) -> PagedBlocks:
    """The scheduler's blocks."""
    return subject.block_manager.paged_blocks


def run(
    subject: Scheduler,
    compute: Callable[[Sequence, int], None] = lambda *_: None,
    begin: Callable[[Schedule], None] = lambda _: None,
    allowance: Allowance | None = None,
) -> Schedule:
    """One step: what is planned can be done, is done within the budgets and beside decodes the *allowance*, and is done.

    *begin* is told the plan, and *compute* each chunk of it.
    """
    # An answer that is admitted again in this step has waited already: the step is not cut for it.
    decoding = [one for one in subject.running if one.num_generated_tokens and one.num_pending_tokens == 1]
    step = schedule_step(subject, allowance)
    check_budgets(subject, step)
    if allowance is not None and any(owner in step.chunks for owner in decoding):
        check_allowance(subject, step, allowance)
    begin(step)
    cache = subject.encoder_scheduler.encoder_cache
    for key in step.encode:
        assert cache.has_begun(key), "planned, and no room was made"
        assert key not in cache, "encoded though it is held"
    for owner, num_tokens in step.chunks.items():
        first = owner.num_computed_tokens
        assert 0 < num_tokens <= owner.num_pending_tokens
        assert len(owner.block_table) * BLOCK >= first + num_tokens, "no block for a token"
        for image_run, shown in owner.media_between(first, first + num_tokens):
            assert shown.key in cache or shown.key in step.encoded, (image_run, "is needed and not encoded")
        compute(owner, num_tokens)
    drawing = tuple(owner for owner, num_tokens in step.chunks.items() if num_tokens == owner.num_pending_tokens)
    subject.launch(step)
    take_results(
        subject, step, PlannedStep(StepInput(0), SamplingInput(0), drawing, ()), StepOutput(0, [0] * len(drawing))
    )
    return step


def check_budgets(subject: Scheduler, step: Schedule) -> None:
    """No step is over a budget, but for one image alone that is over it by itself, or begun last and whole."""
    longest = max((run.length for owner in step.chunks for run in owner.runs), default=0)
    over = longest - 1 if subject.budgets.whole_images and longest else 0
    assert sum(step.chunks.values()) <= subject.budgets.max_num_batched_tokens + over
    assert len(step.chunks) <= len(subject.running) <= subject.budgets.max_num_seqs
    patches = [prod(key.grid) for key in step.encode if key not in step.slices]
    assert sum(patches) <= subject.budgets.encode_budget_patches or len(patches) == 1


def check_allowance(subject: Scheduler, step: Schedule, allowance: Allowance) -> None:
    """Beside decodes, prompts and images have their parts of what is allowed, or the least: some tokens, one layer."""
    tokens = sum(count for owner, count in step.chunks.items() if owner.num_pending_tokens > 1)
    costs = subject.encoder_scheduler.costs
    layers = {key: part.num_layers for key, part in step.slices.items()}
    patch_layers = sum(costs.patches(key.grid) * (layers.get(key) or 1) for key in {**step.encode, **step.slices})
    is_least = len(layers.keys() | step.encode.keys()) == 1 and all((one or 1) == 1 for one in layers.values())
    assert patch_layers <= allowance.patch_layers or is_least
    assert tokens <= max(allowance.tokens, allowance.least_tokens)
    share = Fraction(patch_layers, allowance.patch_layers) + Fraction(tokens, allowance.tokens)
    assert share <= 1 or tokens <= allowance.least_tokens or is_least or not patch_layers


def check_holdings(subject: Scheduler) -> None:
    """Blocks and pins are those of the unfinished sequences, each counted as often as it is held."""
    blocks, owners = paged(subject), [*subject.running, *subject.waiting, *subject.parked, *subject.leaving]
    tables = Counter(block for owner in owners for block in owner.block_table)
    assert [tables[block] for block in range(blocks.num_blocks)] == blocks.references
    check_pins(subject)


def check_pins(subject: Scheduler) -> None:
    """Every pin is that of an unfinished sequence that needs it, and the cache knows it."""
    cache, owners = subject.encoder_scheduler.encoder_cache, [*subject.running, *subject.waiting, *subject.parked]
    known = {shown for images in cache.pins.values() for shown in images}
    assert known == {shown for owner in owners for shown in owner.images if shown.pins}
    for shown in known:
        samples = {owner.index: owner for owner in owners if shown in owner.images}
        for index, until in shown.pins:
            sample = samples[index]
            assert until is not Until.COMPUTED or shown.end > sample.num_computed_tokens, "is not needed any more"
            assert until is Until.ENDED or sample not in subject.parked
    for owner in owners:
        for shown in owner.images:
            assert not shown.pins or cache.has_begun(shown.key)


def lengths(step: Schedule) -> dict[int, int]:
    """Tokens of the step by arrival."""
    return {owner.arrival: num_tokens for owner, num_tokens in step.chunks.items()}
