"""Run a synthetic request, so that the first real request finds everything loaded and torch's buffers allocated."""

from math import prod

from saccade.engine.loop import Engine
from saccade.errors import StartupError
from saccade.identity.content import HASH_BYTES
from saccade.models.facts import Grid
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

NUM_OTHER_TOKENS = 3
"""Tokens of the request with a picture beside the picture's own."""


def run(engine: Engine, num_text_tokens: int, grid: Grid | None = None) -> None:
    """Run text and a picture of *grid* (None: the smallest) through *engine*. Raises StartupError if that fails.

    Use an engine that is discarded afterwards: its caches and counters are not cleared.
    """
    for request in _requests(engine, num_text_tokens, grid):
        engine.submit(0, request)
        while engine.has_work:
            for frame in engine.step().values():
                for failure in (delta.failure for delta in frame.deltas if delta.failure is not None):
                    raise StartupError(f"The model failed on its first request: {failure.message}")


def _requests(engine: Engine, num_text_tokens: int, grid: Grid | None) -> list[EngineRequest]:
    facts = engine.validator.facts
    text = next(index for index in range(facts.vocab_size) if index not in facts.placeholder_token_ids)
    sampling = SamplingParams(max_tokens=2, temperature=0)
    limit = engine.validator.max_model_len
    requests = [
        EngineRequest(request_id="warm-up", token_ids=[text] * min(num_text_tokens, limit - 2), sampling=sampling)
    ]
    grid = facts.square_grid(0) if grid is None else grid
    num_tokens = facts.item_tokens(grid)
    if num_tokens + NUM_OTHER_TOKENS < limit:
        shape = facts.pixel_shape(grid)
        item = MediaItem(
            modality="image",
            content_hash=bytes(HASH_BYTES),
            grid=grid,
            spans=(Span(1, num_tokens),),
            pixel_shape=shape,
            inline=bytes(prod(shape)),
        )
        token_ids = [text, *[facts.placeholder_of["image"]] * num_tokens, text]
        requests.append(EngineRequest(request_id="warm-up", token_ids=token_ids, sampling=sampling, media=(item,)))
    return requests
