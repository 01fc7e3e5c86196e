"""A made-up request, so that the first real one finds everything loaded and torch's buffers allocated."""

from saccade.engine.loop import Engine
from saccade.errors import StartupError
from saccade.identity.content import HASH_BYTES
from saccade.protocol.media import MediaItem, Span
from saccade.protocol.request import EngineRequest, SamplingParams


def run(engine: Engine, num_text_tokens: int, side: int | None = None) -> None:
    """Let *engine* answer text and a picture of side x side patches (None: small). Raises StartupError where it fails.

    Use an engine that is thrown away afterwards: its caches and counters are not cleared.
    """
    for request in _requests(engine, num_text_tokens, side):
        engine.submit(0, request)
        while engine.has_work:
            for frame in engine.step().values():
                for failure in (delta.failure for delta in frame.deltas if delta.failure is not None):
                    raise StartupError(f"The model failed on its first request: {failure.message}")


def _requests(engine: Engine, num_text_tokens: int, side: int | None) -> list[EngineRequest]:
    network = engine.runner.network
    text = next(index for index in range(network.vocab_size) if index not in network.placeholder_token_ids)
    sampling = SamplingParams(max_tokens=2, temperature=0)
    limit = engine.admission.max_model_len
    requests = [
        EngineRequest(request_id="warm-up", token_ids=[text] * min(num_text_tokens, limit - 2), sampling=sampling)
    ]
    side = 2 * network.merge_size if side is None else side
    grid = (1, side, side)
    num_tokens = network.item_tokens(grid)
    if num_tokens + 3 < limit:
        rows, values = network.pixel_shape(grid)
        item = MediaItem(
            modality="image",
            content_hash=bytes(HASH_BYTES),
            grid=grid,
            spans=(Span(1, num_tokens),),
            pixel_shape=(rows, values),
            inline=bytes(rows * values),
        )
        token_ids = [text, *[network.placeholder_of["image"]] * num_tokens, text]
        requests.append(EngineRequest(request_id="warm-up", token_ids=token_ids, sampling=sampling, media=(item,)))
    return requests
