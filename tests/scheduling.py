"""A scheduler with integers for tensors: sequences of made-up tokens and pictures, encoder and network played here."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered

from saccade.engine.block_manager import BlockManager, PagedBlocks, StateGroup
from saccade.engine.encode_planner import NUM_JOBS
from saccade.engine.encoder_cache import EncoderCache
from saccade.engine.scheduler import Budgets, Schedule, Scheduler
from saccade.engine.sequence import Sequence
from saccade.nn.rope import MultimodalPositions
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

BLOCK = 4
FEATURE_BYTES = 10


def picture(start: int, tokens: int, content: bytes, inline: bytes | None = b"") -> MediaItem:
    """A picture of 4 patches a token."""
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
    pictures: tuple[tuple[int, int], ...] = (),
    max_tokens: int = 4,
    inline: bytes | None = b"",
) -> Sequence:
    """A prompt of *length* tokens that no other *arrival* shares; pictures are (start, tokens), each different."""
    media = tuple(
        picture(start, tokens, bytes([arrival % 256, index]), inline) for index, (start, tokens) in enumerate(pictures)
    )
    return of([arrival] * length, media, arrival, max_tokens)


def of(token_ids: Ordered[int], media: tuple[MediaItem, ...], arrival: int, max_tokens: int = 4) -> Sequence:
    """A sequence of these tokens and pictures."""
    request = EngineRequest(
        request_id=str(arrival),
        token_ids=list(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens),
        media=media,
    )
    return Sequence(0, request, arrival, 0, b"", MultimodalPositions([]))


def scheduler(
    num_blocks: int = 100,
    seqs: int = 4,
    tokens: int = 16,
    patches: int = 64,
    groups: tuple[StateGroup, ...] = (),
    encoder_cache_bytes: int = 10_000,
    encode_aside: bool = False,
) -> Scheduler:
    """A scheduler over paged blocks and *groups*."""
    blocks = BlockManager([PagedBlocks(num_blocks, BLOCK), *groups], BLOCK)
    budgets = Budgets(seqs, tokens, patches, encode_aside=encode_aside)
    return Scheduler(budgets, blocks, EncoderCache(encoder_cache_bytes))


def paged(subject: Scheduler) -> PagedBlocks:
    """The scheduler's blocks."""
    group = subject.block_manager.groups[0]
    assert isinstance(group, PagedBlocks)
    return group


def run(subject: Scheduler, compute: Callable[[Sequence, int], None] = lambda *_: None) -> Schedule:
    """One step: what is planned can be done, is done within the budgets, and is done; *compute* is told each chunk."""
    step = subject.schedule()
    check_budgets(subject, step)
    for key in step.encode:
        assert key not in subject.encodings.encoder_cache, "encoded though it is there"
        assert not any(key in job for job in subject.encodings.in_flight), "encoded though it is under way"
        if key not in step.aside:
            subject.encodings.encoder_cache.put(key, "features", FEATURE_BYTES)
    if step.aside:
        subject.encodings.in_flight += (frozenset(step.aside),)
        assert len(subject.encodings.in_flight) <= NUM_JOBS
    if not step.chunks and subject.encodings.in_flight:
        land(subject)
    for owner, num_tokens in step.chunks.items():
        first = owner.num_computed_tokens
        assert 0 < num_tokens <= owner.num_pending_tokens
        assert len(owner.block_table) * BLOCK >= first + num_tokens, "no block for a token"
        for picture_run, source in owner.media_between(first, first + num_tokens):
            assert source.key in subject.encodings.encoder_cache, (picture_run, "is needed and not encoded")
        compute(owner, num_tokens)
    subject.commit(step)
    for owner in list(step.chunks):
        if owner.num_pending_tokens == 0:
            owner.token_ids.append(0)
            if owner.num_generated_tokens >= owner.sampling.max_tokens:
                subject.remove(owner)
    return step


def land(subject: Scheduler) -> None:
    """The oldest job aside is done."""
    job, *others = subject.encodings.in_flight
    for key in job:
        subject.encodings.encoder_cache.put(key, "features", FEATURE_BYTES)
    subject.encodings.in_flight = tuple(others)


def check_budgets(subject: Scheduler, step: Schedule) -> None:
    """No step is over a budget, but for one picture alone that is over it by itself."""
    assert sum(step.chunks.values()) <= subject.budgets.max_num_batched_tokens
    assert len(step.chunks) <= len(subject.running) <= subject.budgets.max_num_seqs
    patches = [key.grid[0] * key.grid[1] * key.grid[2] for key in step.encode]
    assert sum(patches) <= subject.budgets.encode_budget_patches or len(patches) == 1


def check_holdings(subject: Scheduler) -> None:
    """Blocks and pins are those of the unfinished sequences, each counted as often as it is held."""
    blocks, owners = paged(subject), [*subject.running, *subject.waiting, *subject.parked]
    tables = Counter(block for owner in owners for block in owner.block_table)
    assert [tables[block] for block in range(blocks.num_blocks)] == blocks.references
    sources = [source for owner in owners for source in owner.sources]
    pins = Counter(source.key for source in sources for is_held in (source.pinned, source.kept) if is_held)
    assert pins == subject.encodings.encoder_cache._pins


def lengths(step: Schedule) -> dict[int, int]:
    """Tokens of the step by arrival."""
    return {owner.arrival: num_tokens for owner, num_tokens in step.chunks.items()}
