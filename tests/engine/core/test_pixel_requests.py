"""Images that come by their hash alone: used where they are held, asked for once where not. Real model."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import engines
import msgspec
import pytest
from tables import table

from saccade.engine.core import requests
from saccade.engine.loop import Engine
from saccade.errors import InternalError
from saccade.protocol.media import SlotRef
from saccade.protocol.output import FinishReason, StepFrame
from saccade.protocol.request import EngineRequest, MediaPixels, SupplyPixels
from saccade.transport.shared_memory import SlotPool, open_slot

SMALL = (1, 4, 6)
WIDE = (1, 6, 16)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(1 << 20)
    yield pool
    pool.close()


def by_hash(asked: EngineRequest, request_id: str = "hash", *kept: int) -> EngineRequest:
    """The same request without pixels, but for the media *kept*."""
    media = [
        item if index in kept else msgspec.structs.replace(item, inline=None) for index, item in enumerate(asked.media)
    ]
    return msgspec.structs.replace(asked, request_id=request_id, media=tuple(media))


def pixels_of(asked: EngineRequest, request_id: str = "hash", *indices: int) -> SupplyPixels:
    """The answer to a question for the media *indices* of *asked*."""
    media = (MediaPixels(index, inline=asked.media[index].inline) for index in indices)
    return SupplyPixels(request_id=request_id, media=tuple(media))


def in_slot(content: bytes, pool: SlotPool) -> SlotRef:
    slot = pool.acquire(len(content))
    assert slot is not None
    with open_slot(slot.ref) as view:
        view[:] = content
    return slot.ref


def at(seconds: float) -> SimpleNamespace:
    """The module `time` when its monotonic clock shows *seconds*."""
    return SimpleNamespace(monotonic=lambda: seconds, perf_counter=time.perf_counter)


def step(engine: Engine) -> StepFrame:
    return engine.step().get(0, StepFrame([]))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_cached_image_needs_no_pixels(tiny_qwen3_vl: Path, prefix_caching: bool) -> None:  # F5
    subject = engines.engine(tiny_qwen3_vl, enable_prefix_caching=prefix_caching)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30])
    expected = engines.drain(subject, asked).answers["a"].token_ids
    # With other text in front no block is shared: only the encoding can help.
    shifted = engines.request(tiny_qwen3_vl, [5, (SMALL, 1), 30], "shifted")
    for request in (by_hash(asked), by_hash(shifted, "other")):
        engines.drain(subject, request)
    assert engines.drain(subject, by_hash(asked)).answers["hash"].token_ids == expected
    fresh = engines.engine(tiny_qwen3_vl)
    known = engines.drain(fresh, shifted).answers["shifted"].token_ids
    assert engines.drain(subject, by_hash(shifted)).answers["hash"].token_ids == known
    assert subject.load().encoded_items_total == 1
    assert engines.is_idle(subject)


def test_cached_prefix_needs_no_pixels(tiny_qwen3_vl: Path) -> None:  # F5, [eng] 23
    subject = engines.engine(tiny_qwen3_vl, encoder_cache_bytes=0)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30])
    expected = engines.drain(subject, asked).answers["a"].token_ids
    assert engines.drain(subject, by_hash(asked)).answers["hash"].token_ids == expected


@pytest.mark.parametrize("where", ["inline", "slot"])
def test_absent_image_is_requested_once_and_the_answer_is_the_same(
    tiny_qwen3_vl: Path, pool: SlotPool, where: str
) -> None:  # F5
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3, (SMALL, 2), 3, (SMALL, 1), 2])
    expected = engines.drain(engines.engine(tiny_qwen3_vl), asked).answers["a"].token_ids
    subject.requests.submit(0, by_hash(asked, "hash", 1))
    frame = step(subject)
    assert [(wanted.request_id, wanted.media) for wanted in frame.pixels_wanted] == [("hash", [0, 2])]
    assert frame.deltas == []
    # Parked: no work, no blocks, and others pass.
    assert not subject.has_work
    assert subject.load().num_waiting == 1
    assert subject.load().num_free_blocks == subject.load().num_blocks
    assert engines.drain(subject, engines.request(tiny_qwen3_vl, [9], "other")).answers["other"].token_ids
    answer = pixels_of(asked, "hash", 0, 2)
    if where == "slot":
        slots = [in_slot(pixels.inline or b"", pool) for pixels in answer.media]
        media = tuple(MediaPixels(pixels.index, slot) for pixels, slot in zip(answer.media, slots, strict=True))
        answer = msgspec.structs.replace(answer, media=media)
    subject.requests.supply(0, answer)
    told = engines.drain(subject)
    assert told.answers["hash"].token_ids == expected
    assert sorted(told.released) == sorted(pixels.slot.name for pixels in answer.media if pixels.slot)
    assert engines.is_idle(subject)


def test_image_supplied_by_another_request_is_not_requested(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3])
    told = engines.drain(subject, asked, by_hash(asked))
    assert told.answers["hash"].token_ids == told.answers["a"].token_ids != []
    assert subject.load().encoded_items_total == 1


def test_image_that_another_request_failed_to_supply_is_requested(tiny_qwen3_vl: Path) -> None:  # [eng] 16
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3], "hash")
    item = asked.media[0]
    gone = SlotRef(name="saccade-1-1-0123456789abcdef", generation=1, nbytes=len(item.inline or b""))
    dead = msgspec.structs.replace(item, inline=None, slot=gone)
    told = engines.drain(subject, msgspec.structs.replace(asked, request_id="dead", media=(dead,)), by_hash(asked))
    assert told.answers["dead"].failure is not None
    assert told.answers["hash"].finish_reason is None
    subject.requests.supply(0, pixels_of(asked, "hash", 0))
    assert len(engines.drain(subject).answers["hash"].token_ids) == 8
    assert engines.is_idle(subject)


@table(
    ("indices", "cut", "twice"),
    [([1], 0, False), ([0, 0], 0, False), ([], 0, False), ([0], 1, False), ([0], 0, True), ([9], 0, False)],
)
def test_wrong_answer_fails_its_request_alone(
    tiny_qwen3_vl: Path, pool: SlotPool, indices: list[int], cut: int, twice: bool
) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3, (SMALL, 2), 3])
    subject.requests.submit(0, by_hash(asked, "hash", 1))
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [9], "other"))
    step(subject)
    content = (asked.media[0].inline or b"")[cut:]
    slots = [in_slot(content, pool) for _ in indices]
    media = tuple(
        MediaPixels(index, slot, content if twice else None) for index, slot in zip(indices, slots, strict=True)
    )
    subject.requests.supply(0, SupplyPixels(request_id="hash", media=media))
    told = engines.drain(subject)
    failure = told.answers["hash"].failure
    assert failure is not None
    assert failure.code == "internal_error"
    assert sorted(told.released) == sorted(slot.name for slot in slots)
    assert told.answers["other"].finish_reason is FinishReason.LENGTH
    assert engines.is_idle(subject)


def test_unrequested_pixels_fail_their_request(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3])
    subject.requests.submit(0, asked)
    subject.requests.supply(0, pixels_of(asked, "a", 0))
    assert engines.drain(subject).answers["a"].failure is not None


@pytest.mark.parametrize("end", ["abort", "hangup", "late"])
def test_parked_sequences_end_and_late_pixels_are_released(
    tiny_qwen3_vl: Path, pool: SlotPool, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:  # [eng] 17
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3])
    subject.requests.submit(0, by_hash(asked))
    assert step(subject).pixels_wanted
    if end == "abort":
        subject.requests.abort(0, "hash")
    elif end == "hangup":
        subject.requests.hangup(0)
    elif end == "late":
        deadline = time.monotonic() + requests.ANSWER_SECONDS
        monkeypatch.setattr(requests, "time", at(deadline))
    told = engines.drain(subject)
    failure = told.answers["hash"].failure
    assert (failure.code if failure else None) == ("worker_unavailable" if end == "late" else None)
    assert engines.is_idle(subject)
    slot = in_slot(asked.media[0].inline or b"", pool)
    subject.requests.supply(0, SupplyPixels(request_id="hash", media=(MediaPixels(0, slot),)))
    assert engines.drain(subject).released == [slot.name]


def test_deadlines_stay_in_order_if_a_request_id_is_reused(
    tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3])
    now = time.monotonic()

    def ask(request_id: str, after_seconds: float) -> None:
        monkeypatch.setattr(requests, "time", at(now + after_seconds))
        subject.requests.submit(0, by_hash(asked, request_id))
        assert [wanted.request_id for wanted in step(subject).pixels_wanted] == [request_id]

    ask("again", 0)
    ask("other", 10)
    subject.requests.abort(0, "again")
    ask("again", 20)
    late = now + requests.ANSWER_SECONDS + 11
    monkeypatch.setattr(requests, "time", at(late))
    told = engines.drain(subject).answers
    assert told["other"].failure is not None
    assert told["again"].failure is None
    subject.requests.abort(0, "again")
    assert engines.is_idle(subject)


def test_a_request_that_fails_waits_for_no_pixels(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = msgspec.structs.replace(engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3]), num_samples=2)
    subject.requests.submit(0, by_hash(asked))
    assert step(subject).pixels_wanted
    assert subject.scheduler.pixel_deadlines
    [waiting] = subject.scheduler.parked
    subject.scheduler.fail(waiting, InternalError("Broken."))
    # A later request of its id would fail at its deadline.
    assert not subject.scheduler.pixel_deadlines
    assert failure_code(engines.drain(subject)) == "internal_error"


def test_encoder_output_stays_while_a_sequence_without_pixels_needs_it(tiny_qwen3_vl: Path) -> None:
    """Preempted when everything else is forgotten, it is computed again and answers the same."""
    subject = engines.engine(tiny_qwen3_vl, encoder_cache_bytes=40_000)  # room for one image
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30], max_tokens=12)
    expected = engines.drain(subject, asked).answers["a"].token_ids

    def lose_everything() -> None:
        if subject.load().steps_total == before + 4:
            for sequence in list(subject.scheduler.running):
                subject.scheduler.preempt(sequence)
            subject.scheduler.reset_caches(prefix=True, media=False)

    before = subject.load().steps_total
    other = engines.request(tiny_qwen3_vl, [4, (WIDE, 2), 3], "other")
    told = engines.drain(subject, by_hash(asked), other, each_step=lose_everything)
    assert told.answers["hash"].token_ids == expected
    assert subject.load().preemptions_total >= 1
    assert engines.is_idle(subject)


def failure_code(told: engines.Outcome) -> str | None:
    failure = told.answers["hash"].failure
    return failure.code if failure else None


def test_no_pixels_are_requested_after_the_first_token(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, encoder_cache_bytes=0)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30], max_tokens=12)
    engines.drain(subject, asked)
    subject.requests.submit(0, by_hash(asked))
    assert step(subject).deltas  # the prefix has the image
    subject.scheduler.preempt(next(iter(subject.scheduler.running)))
    subject.scheduler.reset_caches(prefix=True, media=False)
    assert failure_code(engines.drain(subject)) == "worker_unavailable"
    assert engines.is_idle(subject)


@pytest.mark.parametrize("held_by", ["prefix", "encoder output"])
def test_one_pixel_request_names_every_image_sent_by_hash(tiny_qwen3_vl: Path, held_by: str) -> None:
    """What is here when one image is asked for may be gone when that has come."""
    subject = engines.engine(tiny_qwen3_vl, encoder_cache_bytes=0 if held_by == "prefix" else 40_000)
    seed = 1 if held_by == "prefix" else 2
    engines.drain(subject, engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30], text_seed=1))
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30, (SMALL, 2), 3], text_seed=seed)
    expected = engines.drain(engines.engine(tiny_qwen3_vl), asked).answers["a"].token_ids
    subject.requests.submit(0, by_hash(asked))
    assert step(subject).pixels_wanted[0].media == [0, 1]
    subject.scheduler.reset_caches(prefix=True, media=True)
    subject.requests.supply(0, pixels_of(asked, "hash", 0, 1))
    assert engines.drain(subject).answers["hash"].token_ids == expected
    assert engines.is_idle(subject)


def test_samples_share_supplied_pixels(tiny_qwen3_vl: Path) -> None:  # [eng] 3
    subject = engines.engine(tiny_qwen3_vl, enable_prefix_caching=False, encoder_cache_bytes=0)
    asked = msgspec.structs.replace(engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3]), num_samples=3)
    subject.requests.submit(0, by_hash(asked))
    assert len(step(subject).pixels_wanted) == 1
    subject.requests.supply(0, pixels_of(asked, "hash", 0))
    ended = []
    while subject.has_work:
        frame = step(subject)
        assert not frame.pixels_wanted
        ended += [delta.index for delta in frame.deltas if delta.finish_reason is FinishReason.LENGTH]
    assert sorted(ended) == [0, 1, 2]
    assert engines.is_idle(subject)


def test_every_end_releases_the_slots(tiny_qwen3_vl: Path, pool: SlotPool) -> None:  # [eng] 17: admission error
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 3])
    slot = in_slot(asked.media[0].inline or b"", pool)
    item = msgspec.structs.replace(asked.media[0], inline=None, slot=slot)
    with_slot = msgspec.structs.replace(asked, media=(item,))
    bad = msgspec.structs.replace(with_slot, request_id="bad", token_ids=[*asked.token_ids[:-1], 10**6])
    assert engines.drain(subject, bad).released == [slot.name]
    # An id that is in use: the second request is dropped, what it lent is not.
    subject.requests.submit(0, asked)
    subject.requests.submit(0, with_slot)
    told = engines.drain(subject)
    assert told.released == [slot.name]
    assert told.answers["a"].finish_reason is FinishReason.LENGTH
