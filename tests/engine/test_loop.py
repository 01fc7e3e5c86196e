"""The engine as a whole: answers, caches, slots, aborts, failures. Real model, real shared memory."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import engines
import msgspec
import pytest
import torch
from tables import table

from saccade.engine.loop import Engine
from saccade.nn.layerwise import Layerwise
from saccade.protocol.engine_load import STEP_TOKEN_BOUNDS
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest
from saccade.transport.shared_memory import SlotPool, open_slot

SMALL = (1, 4, 6)
WIDE = (1, 6, 16)


@pytest.fixture(scope="module")
def shared(tiny_qwen3_vl: Path) -> Engine:
    """One engine for tests that only need some engine; prompts differ by their seeds."""
    return engines.engine(tiny_qwen3_vl, max_model_len=400)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(1 << 20)
    yield pool
    pool.close()


def by_slot(asked: EngineRequest, pool: SlotPool) -> EngineRequest:
    """The same request with its pixels in shared memory."""
    media = []
    for item in asked.media:
        assert item.inline is not None
        slot = pool.acquire(len(item.inline))
        assert slot is not None
        with open_slot(slot.ref) as view:
            view[:] = item.inline
        media.append(msgspec.structs.replace(item, inline=None, slot=slot.ref))
    return msgspec.structs.replace(asked, media=tuple(media))


def names(asked: EngineRequest) -> list[str]:
    return [item.slot.name for item in asked.media if item.slot is not None]


def test_a_step_with_an_image_enters_at_most_29_files(shared: Engine, tiny_qwen3_vl: Path) -> None:
    """A budget: a reader who follows a step opens these files of the engine."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "/saccade/engine/" in name:
            entered.add(name)

    shared.requests.submit(0, engines.request(tiny_qwen3_vl, [5, (WIDE, 77), 9], "traced", max_tokens=2))
    sys.setprofile(note)
    try:
        shared.step()
    finally:
        sys.setprofile(None)
    engines.drain(shared)
    assert len(entered) <= 29, sorted(entered)


def test_an_idle_engine_keeps_no_encoder_output_that_was_dropped(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, encoder_cache_bytes=0)
    engines.drain(subject, engines.request(tiny_qwen3_vl, [5, (WIDE, 1), 4], max_tokens=1))
    assert engines.local(subject).runner.encoder_outputs == {}
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [5, (SMALL, 1), 4, (WIDE, 2), 4, 700], max_tokens=8))
    subject.step()
    subject.requests.hangup(0)
    engines.drain(subject)
    assert engines.local(subject).runner.encoder_outputs == {}
    assert engines.is_idle(subject)


@pytest.mark.parametrize("text", [0, 6, 15, 40])
def test_repeated_request_is_cached_and_not_encoded(
    shared: Engine, tiny_qwen3_vl: Path, text: int
) -> None:  # B3, B4, E6
    asked = engines.request(tiny_qwen3_vl, [5, (WIDE, 70 + text), text], "first", max_tokens=4)
    first = engines.drain(shared, asked).answers["first"]
    before = shared.load()
    again = msgspec.structs.replace(asked, request_id="second")
    second = engines.drain(shared, again).answers["second"]
    load, length = shared.load(), len(asked.token_ids)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 16 * ((length - 1) // 16)
    assert second.token_ids == first.token_ids
    assert load.encoded_items_total == before.encoded_items_total
    assert load.cached_tokens_total - before.cached_tokens_total == second.num_cached_tokens


@pytest.mark.parametrize(("prefix", "media"), [(True, False), (False, True), (True, True)])
def test_reset_clears_the_named_caches(prefix: bool, media: bool, tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [5, (WIDE, 7), 9], "first", max_tokens=4)
    first = engines.drain(subject, asked).answers["first"]
    subject.scheduler.reset_caches(prefix=prefix, media=media)
    second = engines.drain(subject, msgspec.structs.replace(asked, request_id="second")).answers["second"]
    assert second.token_ids == first.token_ids
    assert (second.num_cached_tokens == 0) == prefix
    # An image behind a cached prefix is not looked at again.
    assert subject.load().encoded_items_total == 1 + (prefix and media)


def test_reset_spares_entries_in_use(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [5, (WIDE, 7), 40], max_tokens=12)
    expected = engines.drain(subject, asked).answers["a"].token_ids
    reset = engines.drain(subject, asked, each_step=lambda: subject.scheduler.reset_caches(prefix=True, media=True))
    assert reset.answers["a"].token_ids == expected
    assert engines.is_idle(subject)


def test_other_image_of_the_same_size_shares_no_block_of_it(shared: Engine, tiny_qwen3_vl: Path) -> None:  # E7
    a, b = (
        engines.request(tiny_qwen3_vl, [20, (WIDE, seed), 9], str(seed), text_seed=3, max_tokens=2) for seed in (21, 22)
    )
    assert a.token_ids == b.token_ids
    engines.drain(shared, a)
    assert engines.drain(shared, b).answers["22"].num_cached_tokens == 16  # the image starts at 20


def test_images_are_encoded_once_each(tiny_qwen3_vl: Path) -> None:  # D3, [eng] 5
    subject = engines.engine(tiny_qwen3_vl, enable_prefix_caching=False)
    ab, bc = (
        engines.request(tiny_qwen3_vl, [3, (SMALL, first), 2, (SMALL, first + 1), 4], str(first)) for first in (1, 2)
    )
    engines.drain(subject, ab)
    engines.drain(subject, bc, msgspec.structs.replace(bc, request_id="twin"))
    assert subject.load().encoded_items_total == 3
    assert subject.load().encoder_cache_hits_total == 3


def test_image_across_chunks_is_encoded_once(tiny_qwen3_vl: Path) -> None:  # [eng] 24, 26
    subject = engines.engine(tiny_qwen3_vl, max_num_batched_tokens=8, encoder_cache_bytes=0)
    asked = [engines.request(tiny_qwen3_vl, [3, (WIDE, seed), 3], str(seed)) for seed in (1, 2)]
    engines.drain(subject, *asked)
    assert subject.load().encoded_items_total == 2
    assert subject.load().encoder_cache_bytes == 0


def test_tenants_share_nothing(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = engines.request(tiny_qwen3_vl, [20, (SMALL, 1), 20])
    answers = [
        engines.drain(subject, msgspec.structs.replace(asked, salt=salt)).answers["a"] for salt in (b"", b"t", b"t")
    ]
    assert [answer.num_cached_tokens for answer in answers] == [0, 0, 32]
    assert subject.load().encoded_items_total == 2


def test_encoder_outputs_do_not_pin_their_batch(tiny_qwen3_vl: Path) -> None:  # [eng] 26, 39
    subject = engines.engine(tiny_qwen3_vl)
    engines.drain(subject, engines.request(tiny_qwen3_vl, [1, (SMALL, 1), 1, (WIDE, 2), 1]))
    held = engines.local(subject).runner.encoder_outputs.values()
    assert sum(entry.nbytes for entry in held) == subject.load().encoder_cache_bytes
    for entry in held:
        assert entry.untyped_storage().nbytes() == entry.nbytes
        assert entry.shape[1] == 128 * 4  # main features and three deepstack slices, as one


def test_slots_go_back_once_and_only_misses_are_read(
    shared: Engine, tiny_qwen3_vl: Path, pool: SlotPool
) -> None:  # A7, B1, [eng] 17, 23
    inline = engines.request(tiny_qwen3_vl, [4, (SMALL, 31), 30], max_tokens=3)
    first = by_slot(inline, pool)
    told = engines.drain(shared, first)
    assert told.released == names(first)
    # The prefix holds this image now: its slot is not even opened, so it may be gone.  # [eng] 23
    second = by_slot(inline, pool)
    pool.close()
    assert engines.drain(shared, second).released == names(second)
    assert told.answers["a"].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("when", ["waiting", "running", "hung up"])
def test_abort_gives_back_everything(tiny_qwen3_vl: Path, pool: SlotPool, when: str) -> None:  # [eng] 17, 27
    subject = engines.engine(tiny_qwen3_vl)
    asked = by_slot(engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 4], max_tokens=50), pool)
    subject.requests.submit(7, asked)
    released = []
    if when == "running":
        released += subject.step()[7].released
    subject.requests.abort(7, "a")
    subject.requests.abort(7, "unknown")
    if when == "hung up":
        subject.requests.hangup(7)
        assert not subject.has_work
    else:
        frame = subject.step()[7]
        assert [delta.finish_reason for delta in frame.deltas] == [FinishReason.ABORT]
        assert [*released, *frame.released] == names(asked)
    load = subject.load()
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, load.num_blocks)
    assert load.encoded_items_total == (when == "running")


def test_one_dead_slot_fails_one_request(tiny_qwen3_vl: Path, pool: SlotPool) -> None:  # [eng] 16
    subject = engines.engine(tiny_qwen3_vl)
    inline = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 4], "inline")
    twin = msgspec.structs.replace(by_slot(inline, pool), request_id="twin")
    other = by_slot(engines.request(tiny_qwen3_vl, [4, (SMALL, 2), 4], "other"), pool)
    pool.close()
    told = engines.drain(subject, twin, inline, other)
    assert told.answers["other"].failure is not None
    # The dead twin shows the image that its neighbour brought.
    assert told.answers["twin"].token_ids == told.answers["inline"].token_ids != []
    assert sorted(told.released) == sorted(names(twin) + names(other))


def test_preempted_sequences_answer_the_same(tiny_qwen3_vl: Path) -> None:  # B5, [eng] 4
    asked = [
        engines.request(tiny_qwen3_vl, [seed, (SMALL, seed)], str(seed), seed, max_tokens=40) for seed in range(1, 6)
    ]
    roomy = engines.drain(engines.engine(tiny_qwen3_vl), *asked).answers
    tight = engines.engine(tiny_qwen3_vl, num_blocks=9, encoder_cache_bytes=0, enable_prefix_caching=False)
    told = engines.drain(tight, *asked).answers
    assert tight.load().preemptions_total >= 2
    assert {name: answer.token_ids for name, answer in told.items()} == {
        name: answer.token_ids for name, answer in roomy.items()
    }


def test_dropped_cached_image_is_computed_again(tiny_qwen3_vl: Path, pool: SlotPool) -> None:
    subject = engines.engine(tiny_qwen3_vl, encoder_cache_bytes=0)
    inline = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 30], max_tokens=12)
    expected = engines.drain(subject, inline).answers["a"].token_ids
    asked = by_slot(inline, pool)

    def lose_everything() -> None:
        if subject.load().steps_total == before + 4:
            for sequence in list(subject.scheduler.running):
                subject.scheduler.preempt(sequence)
            subject.scheduler.reset_caches(prefix=True, media=False)

    before = subject.load().steps_total
    told = engines.drain(subject, asked, each_step=lose_everything)
    assert told.answers["a"].num_cached_tokens > 0  # the first time, the slot was not read
    assert told.answers["a"].token_ids == expected
    assert subject.load().encoded_items_total == 2
    assert told.released == names(asked)


def test_seeds_reproduce_alone_and_in_a_batch(shared: Engine, tiny_qwen3_vl: Path) -> None:
    asked = [
        engines.request(tiny_qwen3_vl, [6], str(seed), text_seed=9, temperature=1.5, seed=seed, max_tokens=12)
        for seed in range(8)
    ]
    together = engines.drain(shared, *asked).answers
    alone = {one.request_id: engines.drain(shared, one).answers[one.request_id] for one in asked}
    assert {name: answer.token_ids for name, answer in alone.items()} == {
        name: answer.token_ids for name, answer in together.items()
    }
    assert len({tuple(answer.token_ids) for answer in alone.values()}) == 8
    unseeded = msgspec.structs.replace(asked[0], sampling=msgspec.structs.replace(asked[0].sampling, seed=None))
    fresh = [engines.drain(shared, unseeded).answers["0"].token_ids for _ in range(2)]
    assert fresh[0] != fresh[1]


def test_finish_reasons(shared: Engine, tiny_qwen3_vl: Path) -> None:
    free = engines.request(tiny_qwen3_vl, [6], "free", text_seed=5)
    ids = engines.drain(shared, free).answers["free"].token_ids
    stop = engines.request(tiny_qwen3_vl, [6], "stop", text_seed=5, stop_token_ids=(ids[3],))
    full = engines.request(tiny_qwen3_vl, [397], "full", max_tokens=99)
    answers = engines.drain(shared, stop, full).answers
    assert answers["stop"].token_ids == ids[: ids.index(ids[3]) + 1]
    assert answers["stop"].finish_reason == FinishReason.STOP
    assert len(answers["full"].token_ids) == 3  # prompt and answer fill the context
    assert answers["full"].finish_reason == FinishReason.LENGTH


def test_placeholders_are_never_sampled(tiny_qwen3_vl: Path) -> None:  # [eng] 14
    subject = engines.engine(tiny_qwen3_vl)
    placeholders = subject.validator.spec.placeholder_token_ids
    engines.module(subject).lm_head.weight[list(placeholders)] *= 100
    told = engines.drain(
        subject,
        *(
            engines.request(tiny_qwen3_vl, [5], str(seed), seed, temperature=seed % 2, max_tokens=30)
            for seed in range(8)
        ),
    )
    sampled = {token for answer in told.answers.values() for token in answer.token_ids}
    assert not sampled & set(placeholders)


def test_failed_step_fails_its_sequences_and_the_engine_goes_on(
    shared: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("secret detail")

    asked = [engines.request(tiny_qwen3_vl, [6, (SMALL, 50)], name) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(engines.module(shared).language_model, "forward", broken)
        told = engines.drain(shared, *asked)
    for name in "ab":
        failure = told.answers[name].failure
        assert failure is not None
        assert failure.code == "internal_error"
        assert "secret" not in failure.message
    assert len(engines.drain(shared, asked[0]).answers["a"].token_ids) == 8


def test_an_image_that_cannot_be_encoded_fails_its_request_alone(
    shared: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("secret detail")

    # What is drawn for the failed request stands between what is drawn for the others.
    parts: dict[str, list[Any]] = {"a": [8], "image": [6, (SMALL, 91), 3], "b": [9]}
    asked = [
        engines.request(tiny_qwen3_vl, parts[name], name, text_seed=91, num_logprobs=1, num_prompt_logprobs=0)
        for name in parts
    ]
    with monkeypatch.context() as patch:
        patch.setattr(engines.module(shared), "encode", broken)
        told = engines.drain(shared, *asked).answers
    failure = told["image"].failure
    assert failure is not None
    assert failure.code == "internal_error"
    assert "secret" not in failure.message
    assert not told["image"].token_ids
    expected = engines.drain(shared, *asked).answers
    for name in "ab":
        assert told[name].token_ids == expected[name].token_ids
        given, wanted = ([one.logprob for one in answers[name].logprobs] for answers in (told, expected))
        assert given == pytest.approx(wanted, abs=1e-4)
        assert len(told[name].prompt_logprobs) == len(asked["ab".index(name) * 2].token_ids) - 1
    assert len(expected["image"].token_ids) == 8
    assert engines.is_idle(shared)


@table("place", [0, 1, 2])
def test_images_of_one_call_fail_one_by_one(
    shared: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """The encoder takes all images of a step at once; one that fails must not fail other requests."""
    asked = [engines.request(tiny_qwen3_vl, [6, (SMALL, 60 + place), 3 + number], f"{number}") for number in range(3)]
    asked = [msgspec.structs.replace(one, salt=one.request_id.encode()) for one in asked]
    expected = engines.drain(shared, *asked).answers
    shared.scheduler.reset_caches(prefix=True, media=True)
    encode, num_bytes = engines.module(shared).encode, len(asked[0].media[0].inline or b"")
    num_alone = 0

    def failing(pixels: torch.Tensor, *others: Any) -> Layerwise:
        nonlocal num_alone
        if len(pixels) > num_bytes:
            raise RuntimeError("one of them")
        num_alone += 1
        if num_alone == place + 1:
            raise RuntimeError("this one")
        return encode(pixels, *others)

    with monkeypatch.context() as patch:
        patch.setattr(engines.module(shared), "encode", failing)
        told = engines.drain(shared, *asked).answers
    for name, answer in told.items():
        is_bad = name == f"{place}"
        assert (answer.failure is not None) == is_bad
        assert answer.token_ids == ([] if is_bad else expected[name].token_ids)
    assert engines.is_idle(shared)


def test_connections_get_their_own_deltas(shared: Engine, tiny_qwen3_vl: Path) -> None:
    for connection in (1, 2):
        shared.requests.submit(connection, engines.request(tiny_qwen3_vl, [9], f"{connection}", text_seed=connection))
    for connection, frame in shared.step().items():
        assert [delta.request_id for delta in frame.deltas] == [str(connection)]
    shared.requests.hangup(1)
    while shared.has_work:
        assert set(shared.step()) == {2}


def test_counters_count_each_request(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    assert subject.load().steps_total == 0  # the warm-up leaves no trace
    told = engines.drain(subject, engines.request(tiny_qwen3_vl, [5, (SMALL, 1)]))
    load = subject.load()
    assert (load.steps_total, load.prompt_tokens_total, load.generated_tokens_total) == (told.steps, 11, 8)
    assert (load.encoded_items_total, load.encoded_patches_total) == (1, 24)
    # One step of 11 tokens and 7 of one.
    assert load.step_tokens_total == 18
    assert dict(zip((*STEP_TOKEN_BOUNDS, None), load.steps_by_tokens, strict=True)) == {
        bound: {1: 7, 16: 1}.get(bound, 0) if bound else 0 for bound in (*STEP_TOKEN_BOUNDS, None)
    }
    assert 0 < load.encode_seconds_total < load.network_seconds_total
    assert min(load.schedule_seconds_total, load.batch_seconds_total, load.postprocess_seconds_total) > 0
