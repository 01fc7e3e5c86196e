"""Runs synthetic requests, so that the first real one finds everything loaded and torch's buffers allocated."""

from collections.abc import Iterable
from math import prod

from saccade.engine.core.request_validation import MAX_NUM_LOGPROBS
from saccade.engine.loop import Engine
from saccade.errors import NonFiniteOutput, StartupError
from saccade.identity.content import HASH_BYTES
from saccade.models.spec import Grid
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams

GREEDY = SamplingParams(max_tokens=2, temperature=0)
NUM_OTHER_TOKENS = 3
"""Tokens of the request with an image, without the image's own."""


def run_warmup(engine: Engine, num_text_tokens: int, grid: Grid | None = None, num_rows: int = 0) -> None:
    """Run three kinds of requests through *engine*: text, an image, and draws.

    The image has *grid*, or is the smallest if that is None. One step has *num_rows* draws. Use an engine that is
    discarded afterwards, since its caches and counters are not cleared. Raises StartupError if a request fails for any
    reason except values that are not finite.
    """
    _run(engine, [_text(engine, num_text_tokens)])
    _run(engine, _image(engine, grid))
    _run(engine, [_draw(engine, number) for number in range(num_rows)])


def _run(engine: Engine, requests: Iterable[EngineRequest]) -> None:
    for request in requests:
        engine.requests.submit(0, request)
    while engine.has_work:
        for frame in engine.step().values():
            failures = (delta.failure for delta in frame.deltas if delta.failure is not None)
            # A model may have a damaged token or tower, and answer everything else: the engine logs such values.
            for failure in (one for one in failures if one.code != NonFiniteOutput.code):
                raise StartupError(f"The model failed on its first request: {engine.cause or failure.message}")


def _text_token(engine: Engine) -> int:
    spec = engine.validator.spec
    return next(index for index in range(spec.vocab_size) if index not in spec.placeholder_token_ids)


def _text(engine: Engine, num_tokens: int) -> EngineRequest:
    token_ids = [_text_token(engine)] * min(num_tokens, max(1, engine.validator.max_model_len - 2))
    return EngineRequest(request_id="warm-up", token_ids=token_ids, sampling=GREEDY)


def _draw(engine: Engine, number: int) -> EngineRequest:
    """Return a request for one token whose sampling takes the most memory."""
    sampling = SamplingParams(
        max_tokens=1, temperature=1, top_p=0.9, top_k=50, repetition_penalty=1.1, num_logprobs=MAX_NUM_LOGPROBS
    )
    return EngineRequest(request_id=f"draw-{number}", token_ids=[_text_token(engine)], sampling=sampling)


def _image(engine: Engine, grid: Grid | None) -> list[EngineRequest]:
    """Return a request with an image, or none if it would be too long or if the model reads only text."""
    spec = engine.validator.spec
    if not spec.takes_media:
        return []
    text = _text_token(engine)
    grid = spec.square_grid(0) if grid is None else grid
    num_tokens = spec.item_tokens(grid)
    if num_tokens + NUM_OTHER_TOKENS >= engine.validator.max_model_len:
        return []
    shape = spec.pixel_shape(grid)
    item = MediaItem(
        modality="image",
        content_hash=bytes(HASH_BYTES),
        grid=grid,
        spans=(Span(1, num_tokens),),
        pixel_shape=shape,
        inline=bytes(prod(shape)),
    )
    token_ids = [text, *[spec.placeholder_of["image"]] * num_tokens, text]
    return [EngineRequest(request_id="warm-up", token_ids=token_ids, sampling=GREEDY, media=(item,))]
