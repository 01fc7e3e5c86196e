"""n > 1: one request, one prompt, one look at each image; each sample its own answer. B9, [eng] 3."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
from tables import table

from saccade.engine.core.seeds import sample_seed
from saccade.engine.core.step import StepInput
from saccade.engine.loop import Engine
from saccade.protocol.output import FinishReason, TokenDelta
from saccade.protocol.request import EngineRequest
from saccade.transport.shared_memory import SlotPool, open_slot

SMALL, WIDE = (1, 4, 6), (1, 6, 16)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(1 << 20)
    yield pool
    pool.close()


def several(folder: Path, number: int, parts: list[Any] | None = None, name: str = "a", **params: Any) -> EngineRequest:
    """A request for *number* samples, drawn at random from seed 11."""
    parts = [5, (WIDE, 1), 20] if parts is None else parts
    asked = engines.request(folder, parts, name, **{"temperature": 1.3, "seed": 11, **params})
    return msgspec.structs.replace(asked, num_samples=number)


def by_slot(asked: EngineRequest, pool: SlotPool) -> tuple[EngineRequest, str]:
    """The same request with its one image in shared memory, and the slot's name."""
    [item] = asked.media
    slot = pool.acquire(len(item.inline or b""))
    assert slot is not None
    with open_slot(slot.ref) as view:
        view[:] = item.inline or b""
    moved = msgspec.structs.replace(item, inline=None, slot=slot.ref)
    return msgspec.structs.replace(asked, media=(moved,)), slot.ref.name


def names(number: int, name: str = "a") -> list[str]:
    return [name, *(f"{name}#{index}" for index in range(1, number))]


def alone(subject: Engine, asked: EngineRequest) -> dict[str, list[int]]:
    """The answers of as many requests as there are samples, one after the other, each with its sample's seed."""
    answers = {}
    for index, name in enumerate(names(asked.num_samples, asked.request_id)):
        seed = sample_seed(asked.sampling.seed or 0, index)
        one = msgspec.structs.replace(
            asked, num_samples=1, sampling=msgspec.structs.replace(asked.sampling, seed=seed), request_id=name
        )
        answers[name] = engines.drain(subject, one).answers[name].token_ids
    return answers


def idle(subject: Engine) -> bool:
    """Whether nothing is held any more: no sequence, no block, no pin."""
    load = subject.load()
    held = load.num_running + load.num_waiting + load.num_blocks - load.num_free_blocks
    return not held and not subject.scheduler.encoder_scheduler.encoder_cache.pins and not subject.has_work


@pytest.mark.ci
@table("caching", [True, False])
@table("chunk", [8, 512])
@table("text", [0, 1, 20])
def test_samples_equal_requests_of_one_sample(
    tiny_qwen3_vl: Path, pool: SlotPool, caching: bool, chunk: int, text: int
) -> None:  # B9, [eng] 3
    # Samples that compute the whole prompt again need room for its images.
    settings = {"enable_prefix_caching": caching, "max_num_batched_tokens": chunk}
    subject = engines.engine(tiny_qwen3_vl, **settings, encoder_cache_bytes=0 if caching else 1 << 20)
    inline = several(tiny_qwen3_vl, 4, [5, (WIDE, 1), text])
    asked, slot = by_slot(inline, pool)
    computed: Counter[int] = Counter()

    def count(step: StepInput) -> None:
        index_of = {sequence.row: sequence.index for sequence in subject.scheduler.running}
        computed.update({index_of[chunk.row]: chunk.num_tokens for chunk in step.chunks})

    engines.steps_of(subject, count)
    told = engines.drain(subject, asked)
    load = subject.load()
    assert load.encoded_items_total == 1
    assert told.released == [slot]
    assert idle(subject)
    assert (load.prompt_tokens_total, load.cached_tokens_total) == (len(asked.token_ids), 0)
    assert [answer.num_cached_tokens for answer in told.answers.values()] == [0] * 4
    if caching:
        block = subject.description.block_size
        assert max(computed[index] for index in (1, 2, 3)) <= block + 7  # the prompt's last block, and 7 of 8 tokens
    answers = {name: answer.token_ids for name, answer in told.answers.items()}
    assert len({tuple(answer) for answer in answers.values()}) == 4
    assert answers == alone(engines.engine(tiny_qwen3_vl), inline)


@pytest.mark.parametrize("room", [0, 1, 2])
def test_encoder_outputs_of_samples_stay_within_the_cache_budget(tiny_qwen3_vl: Path, room: int) -> None:
    """Without a prefix cache the samples read all images again: those that have no room are encoded again."""
    parts: list[Any] = [3, (WIDE, 1), 3, (WIDE, 2), 3, (WIDE, 3), 3, (WIDE, 4), 3]
    asked = several(tiny_qwen3_vl, 2, parts)
    expected = alone(engines.engine(tiny_qwen3_vl), asked)
    settings = {"enable_prefix_caching": False, "max_num_batched_tokens": 16}
    plain = engines.engine(tiny_qwen3_vl, **settings)
    engines.drain(plain, asked)
    num_bytes = plain.load().encoder_cache_bytes // 4
    subject = engines.engine(tiny_qwen3_vl, **settings, encoder_cache_bytes=room * num_bytes)
    most = 0

    def watch() -> None:
        nonlocal most
        most = max(most, subject.load().encoder_cache_bytes)

    told = engines.drain(subject, asked, each_step=watch)
    assert {name: answer.token_ids for name, answer in told.answers.items()} == expected
    # One is kept for the samples in any case, and one is read by the chunk.
    assert most <= (max(room, 1) + 1) * num_bytes
    assert idle(subject)


def test_cached_tokens_are_reported_once(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = several(tiny_qwen3_vl, 3)
    engines.drain(subject, asked)
    answers = engines.drain(subject, asked).answers
    reused = (len(asked.token_ids) - 1) // 16 * 16
    assert [answers[name].num_cached_tokens for name in names(3)] == [reused, 0, 0]
    assert subject.load().cached_tokens_total == reused


def test_samples_end_independently(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = several(tiny_qwen3_vl, 4)
    free = engines.drain(subject, asked).answers
    stop = free["a#2"].token_ids[3]
    stopping = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, stop_token_ids=(stop,)))
    answers = engines.drain(subject, stopping).answers
    for name in names(4):
        ids = free[name].token_ids
        ends = stop in ids
        assert answers[name].token_ids == (ids[: ids.index(stop) + 1] if ends else ids)
        assert answers[name].finish_reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
    assert answers["a#2"].finish_reason == FinishReason.STOP


@pytest.mark.parametrize("places", [1, 2, 8])
def test_samples_beyond_max_num_seqs_wait(tiny_qwen3_vl: Path, pool: SlotPool, places: int) -> None:
    subject = engines.engine(tiny_qwen3_vl, max_num_seqs=places)
    asked, slot = by_slot(several(tiny_qwen3_vl, 7, max_tokens=3), pool)
    other = several(tiny_qwen3_vl, 5, [30, (SMALL, 2)], "other", max_tokens=1)
    told = engines.drain(subject, asked, other)
    assert set(told.answers) == {*names(7), *names(5, "other")}
    assert [len(told.answers[name].token_ids) for name in names(7)] == [3] * 7
    assert [len(told.answers[name].token_ids) for name in names(5, "other")] == [1] * 5
    assert told.released == [slot]
    assert subject.load().encoded_items_total == 2  # [eng] 2: each its own image
    assert idle(subject)


@pytest.mark.ci
def test_preempted_samples_answer_the_same(tiny_qwen3_vl: Path) -> None:  # B5, B9
    roomy = engines.engine(tiny_qwen3_vl)
    tight = engines.engine(tiny_qwen3_vl, num_blocks=8, encoder_cache_bytes=0)
    asked = [several(tiny_qwen3_vl, 3, [5, (SMALL, seed), 4], f"{seed}", max_tokens=45) for seed in (1, 2)]
    told = engines.drain(tight, *asked)
    assert tight.load().preemptions_total > 0
    for one in asked:
        expected = alone(roomy, one)
        assert {name: told.answers[name].token_ids for name in expected} == expected
    assert idle(tight)


def test_samples_of_an_image_that_came_by_its_hash(tiny_qwen3_vl: Path) -> None:
    """Nobody could bring it again: its encoder output stays, whatever the caches drop, until every sample has ended."""
    subject = engines.engine(tiny_qwen3_vl, max_num_seqs=1)
    inline = several(tiny_qwen3_vl, 3)
    expected = alone(subject, inline)
    item = msgspec.structs.replace(inline.media[0], inline=None)

    def lose_everything() -> None:
        subject.scheduler.reset_caches(prefix=True, media=True)

    told = engines.drain(subject, msgspec.structs.replace(inline, media=(item,)), each_step=lose_everything)
    assert {name: answer.token_ids for name, answer in told.answers.items()} == expected
    assert subject.load().encoded_items_total == 1
    assert idle(subject)


@pytest.mark.ci
@table("at_once", [1, 2, 4, 9])
@table("loses", [False, True])
def test_samples_of_which_few_run_at_a_time_answer_the_same(tiny_qwen3_vl: Path, at_once: int, loses: bool) -> None:
    """Also if the caches drop all that they may, while samples wait for others and their image came by its hash."""
    subject = engines.engine(tiny_qwen3_vl)
    inline = several(tiny_qwen3_vl, 4, max_tokens=6)
    expected = alone(subject, inline)
    asked = msgspec.structs.replace(inline, num_at_once=at_once)
    if loses:
        asked = msgspec.structs.replace(asked, media=(msgspec.structs.replace(inline.media[0], inline=None),))
    most = 0

    def watch() -> None:
        nonlocal most
        most = max(most, len(subject.scheduler.running))
        if loses:
            subject.scheduler.reset_caches(prefix=True, media=True)

    told = engines.drain(subject, asked, each_step=watch)
    assert {name: answer.token_ids for name, answer in told.answers.items()} == expected
    assert most == min(at_once, 4)
    assert idle(subject)


def deltas(subject: Engine, steps: int = 1) -> list[TokenDelta]:
    return [delta for _ in range(steps) for frame in subject.step().values() for delta in frame.deltas]


@pytest.mark.ci
@table("steps", [0, 1, 4, 8])
@table("index", [0, 1, 3])
def test_one_sample_is_aborted(tiny_qwen3_vl: Path, pool: SlotPool, steps: int, index: int) -> None:
    """Before any work, while the prompt is computed, while samples wait for places, and while they decode."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "encoder_cache_bytes": 0}
    subject = engines.engine(tiny_qwen3_vl, **settings)
    inline = several(tiny_qwen3_vl, 4, max_tokens=12)
    asked, slot = by_slot(inline, pool)

    def abort() -> None:
        if subject.load().steps_total == steps:
            for which in (index, index, 99):
                subject.requests.abort(0, "a", which)

    subject.requests.submit(0, asked)
    abort()
    told = engines.drain(subject, each_step=abort)
    expected = alone(engines.engine(tiny_qwen3_vl), inline)
    for name, answer in told.answers.items():
        aborted = name == names(4)[index]
        assert answer.finish_reason == (FinishReason.ABORT if aborted else FinishReason.LENGTH)
        assert answer.token_ids == expected[name][: len(answer.token_ids) if aborted else None]
    assert set(told.answers) == set(expected)
    assert subject.load().encoded_items_total == 1
    assert told.released == [slot]
    assert idle(subject)


@pytest.mark.parametrize("steps", [0, 1, 4, 8])
def test_the_whole_request_is_aborted(tiny_qwen3_vl: Path, pool: SlotPool, steps: int) -> None:  # [eng] 17, 27
    subject = engines.engine(tiny_qwen3_vl, max_num_seqs=2, max_num_batched_tokens=16)
    asked, slot = by_slot(several(tiny_qwen3_vl, 4, max_tokens=12), pool)
    subject.requests.submit(0, asked)
    released = [name for _ in range(steps) for frame in subject.step().values() for name in frame.released]
    subject.requests.abort(0, "a")
    told = engines.drain(subject)
    assert released + told.released == [slot]
    assert [told.answers[name].finish_reason for name in names(4)] == [FinishReason.ABORT] * 4
    assert told.steps == 1
    assert subject.load().encoded_items_total == (steps > 0)
    assert idle(subject)


def test_closed_connection_ends_its_samples(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, max_num_seqs=2)
    subject.requests.submit(4, several(tiny_qwen3_vl, 4))
    deltas(subject, 2)
    subject.requests.hangup(4)
    assert idle(subject)


def test_failure_is_reported_once(tiny_qwen3_vl: Path, pool: SlotPool, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    dead, _ = by_slot(several(tiny_qwen3_vl, 4), pool)
    pool.close()
    subject.requests.submit(0, dead)
    [delta] = deltas(subject)
    assert (delta.finish_reason, delta.failure is not None) == (FinishReason.ERROR, True)
    assert idle(subject)

    def broken(*_: Any) -> None:
        raise RuntimeError

    subject.requests.submit(0, several(tiny_qwen3_vl, 4))
    other = engines.request(tiny_qwen3_vl, [9], "other")
    deltas(subject, 3)
    subject.requests.submit(0, other)
    with monkeypatch.context() as patch:
        patch.setattr(engines.module(subject).language_model, "forward", broken)
        failed = deltas(subject)
    assert sorted((one.request_id, one.failure is not None) for one in failed) == [("a", True), ("other", True)]
    assert idle(subject)
    assert len(engines.drain(subject, other).answers["other"].token_ids) == 8


def test_prompt_logprobs_are_in_the_first_sample_alone(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl)
    asked = several(tiny_qwen3_vl, 3, num_logprobs=1, num_prompt_logprobs=1)
    answers = engines.drain(subject, asked).answers
    lengths = [len(answers[name].prompt_logprobs) for name in names(3)]
    assert lengths == [len(asked.token_ids) - 1, 0, 0]
    assert all(len(answers[name].logprobs) == 8 for name in names(3))


def test_samples_have_times_of_their_own(tiny_qwen3_vl: Path) -> None:  # F10
    subject = engines.engine(tiny_qwen3_vl)
    asked = several(tiny_qwen3_vl, 2)
    text = engines.request(tiny_qwen3_vl, [9], "text", max_tokens=1)
    answers = engines.drain(subject, asked, text).answers
    first, second, other = (answers[name].times for name in ("a", "a#1", "text"))
    assert first is not None
    assert second is not None
    assert other is not None
    assert 0 < first.encode_seconds <= first.prefill_seconds
    assert first.encode_seconds == pytest.approx(subject.load().encode_seconds_total)
    assert min(first.queue_seconds, first.decode_seconds, second.prefill_seconds, second.decode_seconds) > 0
    assert second.queue_seconds > first.queue_seconds + first.prefill_seconds / 2
    assert second.encode_seconds == other.encode_seconds == other.decode_seconds == 0
    subject.requests.submit(0, asked)
    subject.requests.abort(0, "a")
    assert [delta.times for delta in deltas(subject)] == [None, None]  # it never ran
