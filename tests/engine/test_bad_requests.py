"""A bad request fails by itself, with a code, a sentence and the field; its neighbour goes on. Contract 8, [eng] 8."""

from collections.abc import Callable
from pathlib import Path

import engines
import msgspec
import pytest
from tables import table

from saccade.engine.loop import Engine
from saccade.protocol.media import MediaItem, SlotRef, Span
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest

GRID = (1, 4, 6)
MAX_MODEL_LEN = 64
Change = Callable[[EngineRequest], EngineRequest]


@pytest.fixture(scope="module")
def subject(tiny_qwen3_vl: Path) -> Engine:
    return engines.engine(tiny_qwen3_vl, max_model_len=MAX_MODEL_LEN)


def item(**fields: object) -> Change:
    """Change the prompt's one image, which stands at tokens [4, 10)."""
    return lambda asked: msgspec.structs.replace(
        asked, media=tuple(msgspec.structs.replace(image, **fields) for image in asked.media)
    )


def sampling(**fields: object) -> Change:
    return lambda asked: msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, **fields))


def tokens(change: Callable[[list[int]], list[int]]) -> Change:
    return lambda asked: msgspec.structs.replace(asked, token_ids=change(asked.token_ids))


def twice(asked: EngineRequest) -> EngineRequest:
    return msgspec.structs.replace(asked, media=asked.media * 2)


def no_media(asked: EngineRequest) -> EngineRequest:
    return msgspec.structs.replace(asked, media=())


GONE = SlotRef(name="saccade-1-1-0123456789abcdef", generation=1, nbytes=24 * 768)

CASES: dict[str, tuple[Change, str, str | None]] = {
    "empty prompt": (tokens(lambda _: []), "invalid_value", "token_ids"),
    "prompt as long as the context": (tokens(lambda ids: ids + [1] * 50), "context_length_exceeded", "token_ids"),
    "id over the vocabulary": (tokens(lambda ids: [10**6, *ids[1:]]), "invalid_value", "token_ids"),
    "negative id": (tokens(lambda ids: [-1, *ids[1:]]), "invalid_value", "token_ids"),
    "span behind the prompt": (item(spans=(Span(12, 6),)), "invalid_value", "media[0].spans"),
    "negative span": (item(spans=(Span(-2, 6),)), "invalid_value", "media[0].spans"),
    "span of no length": (item(spans=(Span(4, 0),)), "invalid_value", "media[0].spans"),
    "two spans": (item(spans=(Span(4, 3), Span(7, 3))), "invalid_value", "media[0].spans"),
    "no span": (item(spans=()), "invalid_value", "media[0].spans"),
    "span over text": (item(spans=(Span(3, 6),)), "invalid_value", "media[0].spans"),
    "count unlike the grid": (item(spans=(Span(4, 5),)), "invalid_value", "media[0].spans"),
    "overlap": (twice, "invalid_value", "media"),
    "placeholders without image": (no_media, "invalid_value", "media"),
    "odd grid": (item(grid=(1, 3, 8)), "invalid_value", "media[0].grid"),
    "two frames": (item(grid=(2, 2, 6)), "invalid_value", "media[0].grid"),
    "negative grid": (item(grid=(1, -4, -6)), "invalid_value", "media[0].grid"),
    "modality": (item(modality="audio"), "invalid_value", "media[0].modality"),
    "placeholders of another modality": (item(modality="video"), "invalid_value", "media[0].spans"),
    "short hash": (item(content_hash=b"abc"), "invalid_value", "media[0].content_hash"),
    "pixel shape": (item(pixel_shape=(24, 1536)), "invalid_value", "media[0].pixel_shape"),
    "pixel dtype": (item(pixel_dtype="float32"), "invalid_value", "media[0].pixel_shape"),
    "pixel bytes": (item(inline=b"short"), "invalid_value", "media[0]"),
    "slot bytes": (item(inline=None, slot=SlotRef(name="s", generation=1, nbytes=3)), "invalid_value", "media[0]"),
    "slot that is gone": (item(inline=None, slot=GONE), "worker_failed", "media[0]"),
    "slot with a path for a name": (
        item(inline=None, slot=msgspec.structs.replace(GONE, name="../etc/passwd")), "worker_failed", "media[0]",
    ),
    "max_tokens": (sampling(max_tokens=0), "invalid_value", "max_tokens"),
    "temperature": (sampling(temperature=float("nan")), "invalid_value", "temperature"),
    "top_p": (sampling(top_p=0.0), "invalid_value", "top_p"),
    "top_k": (sampling(top_k=-1), "invalid_value", "top_k"),
}  # fmt: skip


@table("name", CASES)
def test_bad_request_fails_alone(subject: Engine, tiny_qwen3_vl: Path, name: str) -> None:  # [eng] 6, 8, 21
    change, code, param = CASES[name]
    parts: list[int | tuple[tuple[int, int, int], int]] = [4, (GRID, 100 + list(CASES).index(name)), 5]
    good = engines.request(tiny_qwen3_vl, [4, (GRID, 1), 5], "good")
    bad = change(engines.request(tiny_qwen3_vl, parts, "bad"))
    outcome = engines.drain(subject, bad, good)
    answer = outcome.answers["bad"]
    assert answer.finish_reason == FinishReason.ERROR
    assert answer.token_ids == []
    assert answer.failure is not None
    assert (answer.failure.code, answer.failure.param) == (code, param)
    assert outcome.answers["good"].finish_reason == FinishReason.LENGTH
    assert len(outcome.answers["good"].token_ids) == 8
    load = subject.load()
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, load.num_blocks)
    slots = [media.slot.name for media in bad.media if isinstance(media, MediaItem) and media.slot]
    assert outcome.released == slots
