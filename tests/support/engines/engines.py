"""Engines, requests and answers for tests of the engine room; and the reference's logits for the same tokens."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from saccade import models
from saccade.engine.config import EngineConfig
from saccade.engine.core.proposal_prices import Prices, StepTimes
from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import Speculation
from saccade.engine.core.step import SamplingInput, StepInput
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.models.files import engine_config, image_processor, parse_json, read_model_files, video_processor
from saccade.nn.context import RecurrentState
from saccade.nn.parallel import Ranks
from saccade.protocol.media import ImageLayout, MediaItem, Span, VideoHeader
from saccade.protocol.output import Failure, FinishReason, SampleTimes, StepFrame, TokenLogprob
from saccade.protocol.request import EngineRequest, SamplingParams

Grid = tuple[int, int, int]


def engine(folder: Path, **settings: Any) -> Engine:
    """A warm engine on the CPU; float32, small pools and steps that no clock changes, unless told otherwise."""
    defaults = {"device": "cpu", "dtype": "float32", "num_blocks": 256, "max_num_seqs": 8, "max_inter_token_latency": 0}
    subject = start(EngineConfig(str(folder), "tiny", **{**defaults, **settings}), lambda *_: None)
    if subject.scheduler.speculation is not None:
        untimed(subject.scheduler.speculation)
    return subject


def untimed(speculation: Speculation) -> Speculation:
    """*speculation*, whose proposals cost nothing, whatever time steps take."""
    speculation.times = Free()
    return speculation


class Free(StepTimes):
    """Makes every proposal free."""

    def prices(self, num_rows: int, num_tokens: int) -> Prices:
        return Prices(self, num_rows, num_tokens, 0.0, 0.0, 0.0)


@contextmanager
def on_ranks(folder: Path, size: int = 2, **settings: Any) -> Iterator[Engine]:
    """A warm engine whose network is computed by *size* processes; rank 0 is this one. One at a time."""
    before = torch.get_num_threads()
    subject = engine(folder, tensor_parallel_size=size, **settings)
    try:
        yield subject
    finally:
        subject.close()
        torch.set_num_threads(before)


@contextmanager
def counted_sums() -> Iterator[list[int]]:
    """A list that fills with an entry for each sum over ranks."""
    sums: list[int] = []
    all_reduce = Ranks.all_reduce

    def counting(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        sums.extend([x.numel()] * (ranks.size > 1))
        return all_reduce(ranks, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "all_reduce", counting)
        yield sums


def image(grid: Grid, seed: int, start: int = 0) -> MediaItem:
    """An image of random patches, inline, whose placeholders start at *start*."""
    rows = grid[0] * grid[1] * grid[2]
    pixels = np.random.default_rng(seed).integers(0, 256, (rows, 768), dtype=np.uint8).tobytes()
    return MediaItem(
        modality="image",
        content_hash=blake2b(pixels, digest_size=32).digest(),
        grid=grid,
        spans=(Span(start, rows // 4),),
        pixel_shape=(rows, 768),
        inline=pixels,
    )


def photo(folder: Path, size: tuple[int, int], seed: int, start: int = 0) -> MediaItem:
    """An image of *size* (width, height) with random pixels, as the family's halves bring it to the wire; inline."""
    files = read_model_files(folder)
    config = parse_json(files, "config.json")
    family = models.family_of(config)
    layout = models.load_layout(family)(config, image_processor(files, models.families()[family]))
    shape = layout.image(*size, layout.settings)
    rgb = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    patches = np.zeros(shape.pixel_shape, np.uint8)
    models.load_pixels(family)(layout.settings).write_pixels(rgb, shape, patches)
    pixels = patches.tobytes()
    return MediaItem(
        modality="image",
        content_hash=blake2b(pixels, digest_size=32).digest(),
        grid=shape.grid,
        spans=tuple(divided(start, shape)),
        pixel_shape=shape.pixel_shape,
        original_size=shape.original_size,
        inline=pixels,
    )


def video(folder: Path, size: tuple[int, int], num_frames: int, seed: int, start: int = 0) -> MediaItem:
    """A video of *num_frames* of *size* (width, height) with random pixels, four a second, as for the wire; inline."""
    files = read_model_files(folder)
    config = parse_json(files, "config.json")
    family = models.family_of(config)
    processor = image_processor(files, models.families()[family])
    layout = models.load_video_layout(family)(config, processor, video_processor(files))
    settings = {**layout.settings, "min_pixels": 56 * 56, "max_pixels": 1 << 20}
    shape = layout.video(VideoHeader(num_frames, 4.0, *size), settings)
    draw = np.random.default_rng(seed)
    frames = [draw.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8) for _ in shape.frames]
    patches = np.zeros(shape.pixel_shape, np.uint8)
    models.load_video_pixels(family)(settings).write_pixels(frames, shape, patches)
    pixels = patches.tobytes()
    return MediaItem(
        modality="video",
        content_hash=blake2b(pixels, digest_size=32).digest(),
        grid=shape.grid,
        spans=tuple(divided(start, shape)),
        pixel_shape=shape.pixel_shape,
        seconds_per_group=shape.seconds_per_group,
        inline=pixels,
    )


def divided(start: int, shape: ImageLayout) -> Iterator[Span]:
    """The runs of placeholders of an item from *start* on, with room between them for text of two tokens."""
    for length in [piece for piece in shape.prompt if isinstance(piece, int)] or [shape.num_tokens]:
        yield Span(start, length)
        start += length + 2


def placeholder_ids(folder: Path) -> Mapping[str, int]:
    """The id of the placeholder token of each modality."""
    files = read_model_files(folder)
    family = models.family_of(parse_json(files, "config.json"))
    config = engine_config(files, models.families()[family])
    return models.load_spec(family, config).placeholder_of


def placeholder_id(folder: Path) -> int:
    """The id of the placeholder token of images."""
    return placeholder_ids(folder)["image"]


def request(
    folder: Path, parts: list[Any], request_id: str = "a", text_seed: int = 0, **sampling: Any
) -> EngineRequest:
    """A prompt of parts: a number of random text tokens, an image as (grid, seed) or (size, seed), or a video.

    Greedy unless told otherwise. A grid is of random patches of Qwen3-VL's; a size is (width, height); a video is
    (size, number of frames, seed).
    """
    placeholders = placeholder_ids(folder)
    first = min(placeholders.values(), default=500)
    draw = np.random.default_rng(text_seed)
    token_ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            token_ids += draw.integers(0, min(500, first), part).tolist()
        else:
            make = image if len(part[0]) == 3 else partial(photo if len(part) == 2 else video, folder)
            item = make(*part, start=len(token_ids))
            media.append(item)
            for span in item.spans:
                token_ids += draw.integers(0, min(500, first), span.start - len(token_ids)).tolist()
                token_ids += [placeholders[item.modality]] * span.length
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0, **sampling})
    return EngineRequest(request_id=request_id, token_ids=token_ids, sampling=params, media=tuple(media))


@dataclass
class Answer:
    """All that came back for one request, or one sample of it."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    failure: Failure | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    times: SampleTimes | None = None


@dataclass
class Outcome:
    """All that a connection was told. Sample i of request "a" is "a" for 0, "a#i" for others."""

    answers: defaultdict[str, Answer] = field(default_factory=lambda: defaultdict(Answer))
    released: list[str] = field(default_factory=list)
    steps: int = 0


def drain(
    engine: Engine, *requests: EngineRequest, connection: int = 0, each_step: Callable[[], None] = lambda: None
) -> Outcome:
    """Submit, step until there is no work, and collect what is said to *connection*."""
    outcome = Outcome()
    for submitted in requests:
        engine.requests.submit(connection, submitted)
    while engine.has_work:
        frame = engine.step().get(connection)
        outcome.steps += 1
        each_step()
        if frame is not None:
            collect(outcome, frame)
    return outcome


def collect(outcome: Outcome, frame: StepFrame) -> None:
    """Add what *frame* tells to *outcome*."""
    outcome.released += frame.released
    for delta in frame.deltas:
        answer = outcome.answers[_name(delta.request_id, delta.index)]
        assert answer.finish_reason is None, "a delta behind the last one"
        answer.token_ids += delta.token_ids
        answer.finish_reason = delta.finish_reason
        answer.num_cached_tokens += delta.num_cached_tokens
        answer.failure = delta.failure
        answer.logprobs += delta.logprobs
        answer.prompt_logprobs += delta.prompt_logprobs
        answer.times = delta.times


class Scripted:
    """Proposes the answers that requests are known to have, every *wrong*-th token wrong, and tokens after the end."""

    def __init__(self, known: Mapping[str, Answer], wrong: int = 0) -> None:
        self._known, self._wrong = known, wrong

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        name = _name(sequence.request_id, sequence.index)
        start = sequence.num_generated_tokens
        following = [*self._known[name].token_ids[start:], *([5] * most)][:most]
        return [
            token_id ^ bool(self._wrong and (start + number) % self._wrong == 0)
            for number, token_id in enumerate(following)
        ]


def speculating(subject: Engine, known: Mapping[str, Answer], wrong: int = 0) -> Engine:
    """The engine, with proposals of at most four tokens from a script."""
    subject.scheduler.speculation = untimed(Speculation(Scripted(known, wrong), 4))
    return subject


def _name(request_id: str, index: int) -> str:
    return f"{request_id}#{index}" if index else request_id


def is_idle(engine: Engine) -> bool:
    """Nothing of any request is left."""
    load = engine.load()
    num_pinned = len(engine.scheduler.encoder_scheduler.encoder_cache.pins)
    return (load.num_running, load.num_waiting, load.num_free_blocks, num_pinned) == (0, 0, load.num_blocks, 0)


def local(engine: Engine) -> LocalExecutor:
    """The engine's executor, which is in this process."""
    executor = engine.executor if engine.recorder is None else engine.recorder.executor
    assert isinstance(executor, LocalExecutor)
    return executor


def module(engine: Engine) -> Any:
    """The engine's network as the torch module that it is."""
    return local(engine).runner.network


def cache_tensors(engine: Engine) -> list[torch.Tensor]:
    """All tensors of the engine's caches: blocks, live states and checkpoints."""
    return [
        tensor
        for cache in local(engine).runner.caches.layers
        for part in cache
        for tensor in (part if isinstance(cache, RecurrentState) else (part,))
        if isinstance(tensor, torch.Tensor)  # and no scale
    ]


def poison(engine: Engine) -> Engine:
    """The same engine; what any layer reads that it did not write shows in every number that follows."""
    for tensor in cache_tensors(engine):
        tensor.fill_(float("nan"))
    return engine


def spoil_unused(engine: Engine) -> None:
    """Overwrite the rows and the blocks in which nothing is kept. The engine must have no prefix cache."""
    caches = local(engine).runner.caches
    used = {sequence.row for sequence in engine.scheduler.running}
    rows = [row for row in range(caches.sizes.num_rows) if row not in used]
    manager = engine.scheduler.block_manager
    groups = {False: manager.paged_blocks, True: manager.window_blocks or manager.paged_blocks}
    blocks = {
        in_window: [block for block, count in enumerate(group.references) if count == 0]
        for in_window, group in groups.items()
    }
    for cache, window in zip(caches.layers, caches.windows, strict=True):
        for tensor in cache.live if isinstance(cache, RecurrentState) else cache:
            if isinstance(tensor, torch.Tensor):
                tensor[rows if isinstance(cache, RecurrentState) else blocks[window is not None]] = float("nan")


def steps_of(engine: Engine, each: Callable[[StepInput], object] = lambda _: None) -> list[SamplingInput]:
    """Return a list that fills with the engine's sampling inputs. *each* is called with every step before it runs."""
    found: list[SamplingInput] = []
    launch = engine.executor.launch

    def launching(step: StepInput, sampling: SamplingInput) -> None:
        each(step)
        found.append(sampling)
        launch(step, sampling)

    engine.executor.launch = launching  # type: ignore[method-assign]
    return found


def record_logits(engine: Engine) -> dict[str, list[torch.Tensor]]:
    """Return a dict that fills with every row of logits sampled from, by sample as in Outcome."""
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    runner = local(engine).runner
    sampler: Any = runner.sampler

    def recording(logits: torch.Tensor, rows: tuple[int, ...], *others: Any) -> Any:
        owners = {sequence.row: sequence for sequence in engine.scheduler.running}
        for row, one in zip(rows, logits.clone(), strict=True):
            found[_name(owners[row].request_id, owners[row].index)].append(one)
        return sampler(logits, rows, *others)

    runner.sampler = recording  # type: ignore[assignment]
    return found
