"""Engines, requests and answers for tests of the engine room; and the reference's logits for the same tokens."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.executor.local import LocalExecutor
from saccade.engine.loop import Engine
from saccade.engine.startup import start
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.output import Failure, FinishReason, SampleTimes, TokenLogprob
from saccade.protocol.request import EngineRequest, SamplingParams

Grid = tuple[int, int, int]


def engine(folder: Path, **settings: Any) -> Engine:
    """A warm engine on the CPU; float32 and small pools unless told otherwise."""
    defaults = {"device": "cpu", "dtype": "float32", "num_blocks": 256, "max_num_seqs": 8}
    return start(EngineConfig(str(folder), "tiny", **{**defaults, **settings}), lambda *_: None)


def picture(grid: Grid, seed: int, start: int = 0) -> MediaItem:
    """A picture of random patches, inline, whose placeholders start at *start*."""
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


def request(
    folder: Path, parts: list[int | tuple[Grid, int]], request_id: str = "a", text_seed: int = 0, **sampling: Any
) -> EngineRequest:
    """A prompt of parts: a number of random text tokens, or a picture as (grid, seed). Greedy unless told otherwise."""
    config = json.loads((folder / "config.json").read_text())
    draw = np.random.default_rng(text_seed)
    token_ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            token_ids += draw.integers(0, min(500, config["image_token_id"]), part).tolist()
        else:
            item = picture(*part, start=len(token_ids))
            media.append(item)
            token_ids += [config["image_token_id"]] * item.spans[0].length
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
        engine.submit(connection, submitted)
    while engine.has_work:
        frame = engine.step().get(connection)
        outcome.steps += 1
        each_step()
        if frame is None:
            continue
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
    return outcome


def _name(request_id: str, index: int) -> str:
    return f"{request_id}#{index}" if index else request_id


def is_idle(engine: Engine) -> bool:
    """Nothing of any request is left."""
    load = engine.load()
    num_pinned = len(engine.scheduler.encodings.encoder_cache.pins)
    return (load.num_running, load.num_waiting, load.num_free_blocks, num_pinned) == (0, 0, load.num_blocks, 0)


def local(engine: Engine) -> LocalExecutor:
    """The engine's executor, which is in this process."""
    executor = engine.executor if engine.recorder is None else engine.recorder.executor
    assert isinstance(executor, LocalExecutor)
    return executor


def module(engine: Engine) -> Any:
    """The engine's network as the torch module that it is."""
    return local(engine).runner.network


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


class Oracle:
    """transformers' model, in float32, fed with the same tokens and patches."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.placeholder = self.model.config.image_token_id

    @torch.inference_mode()
    def logits(self, asked: EngineRequest, token_ids: list[int]) -> torch.Tensor:
        """Return the logits [len(token_ids), vocab] from which each of *token_ids*, the answer, was chosen."""
        ids = torch.tensor([asked.token_ids + token_ids[:-1]])
        inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == self.placeholder).int()}
        if asked.media:
            inputs["pixel_values"] = torch.cat([self.pixel_values(item) for item in asked.media])
            inputs["image_grid_thw"] = torch.tensor([item.grid for item in asked.media])
        self.model.model.rope_deltas = None
        return self.model(**inputs).logits[0, len(asked.token_ids) - 1 :].float()

    @staticmethod
    def pixel_values(item: MediaItem) -> torch.Tensor:
        patches = torch.frombuffer(bytearray(item.inline or b""), dtype=torch.uint8).view(-1, 3, 1, 16, 16)
        doubled = patches.expand(-1, -1, 2, -1, -1).float()
        return ((doubled - 127.5) / 127.5).flatten(1)
