"""Faults that other engines had or have; here they are looked for with a real model. Numbers: docs/test-list.md."""

from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import torch

from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.images import EncoderKey
from saccade.engine.core.schedule import Schedule
from saccade.engine.core.step_builder import Rows, StepBuilder
from saccade.engine.executor.batch import RowBuffers, build_batch
from saccade.engine.loop import Engine
from saccade.errors import QueueFull
from saccade.nn.context import ForwardContext
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest

SMALL = (1, 4, 6)
WIDE = (1, 4, 16)
TALL = (1, 16, 4)


@pytest.fixture(scope="module")
def shared(tiny_qwen3_vl: Path) -> Engine:
    """One engine for tests that only need some engine; prompts differ by their seeds."""
    return engines.engine(tiny_qwen3_vl)


@pytest.fixture(scope="module")
def plain(tiny_qwen3_vl: Path) -> Engine:
    """An engine that remembers nothing, for answers to compare with."""
    return engines.engine(tiny_qwen3_vl, enable_prefix_caching=False, encoder_cache_bytes=0)


def answer(engine: Engine, asked: EngineRequest) -> list[int]:
    return engines.drain(engine, asked).answers[asked.request_id].token_ids


def seen_positions(engine: Engine) -> dict[int, set[tuple[int, ...]]]:
    """Return a dict that fills with the positions that each token of the one running sequence was ever given."""
    seen: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
    network = engines.module(engine)

    def recording(_: Any, arguments: tuple[Any, ...]) -> None:
        context: ForwardContext = arguments[1]
        (length,), (stop,) = context.layout.query_lengths, context.layout.host_context_lengths
        for index, place in zip(range(stop - length, stop), context.positions.t().tolist(), strict=True):
            seen[index].add(tuple(place))

    network.register_forward_pre_hook(recording)
    return seen


def test_images_may_come_in_any_order(shared: Engine, plain: Engine, tiny_qwen3_vl: Path) -> None:  # [eng] 1
    asked = engines.request(tiny_qwen3_vl, [3, (WIDE, 1), 2, (SMALL, 2), 2, (TALL, 3), 4])
    backwards = msgspec.structs.replace(asked, request_id="backwards", media=asked.media[::-1])
    expected = answer(plain, asked)
    assert answer(plain, backwards) == answer(shared, backwards) == expected
    assert answer(shared, asked) == expected


def test_prompts_of_one_batch_keep_their_own_images(plain: Engine, tiny_qwen3_vl: Path) -> None:  # B9, [eng] 2
    asked = [
        engines.request(tiny_qwen3_vl, [4, (WIDE, seed), 3], str(seed), text_seed=7, max_tokens=12) for seed in range(6)
    ]
    alone = {one.request_id: answer(plain, one) for one in asked}
    assert len({tuple(token_ids) for token_ids in alone.values()}) > 1  # else sharing would not show
    for order in (asked, asked[::-1]):
        together = engines.drain(plain, *order).answers
        assert {name: told.token_ids for name, told in together.items()} == alone


@pytest.mark.parametrize("times", [1, 2])
def test_preemption_keeps_every_position(tiny_qwen3_vl: Path, times: int) -> None:  # B5, [eng] 4, 29
    """The prompt ends in an image, where the answer's positions do not follow from the last token's."""
    subject = engines.engine(tiny_qwen3_vl, enable_prefix_caching=False)
    seen = seen_positions(subject)
    asked = engines.request(tiny_qwen3_vl, [3, (TALL, 1), 2, (WIDE, 2)], max_tokens=12)

    def preempt() -> None:
        if subject.load().preemptions_total < times and subject.load().steps_total % 4 == 0:
            subject.scheduler.preempt(next(iter(subject.scheduler.running)))

    engines.drain(subject, asked, each_step=preempt)
    assert subject.load().preemptions_total == times
    end, stop = len(asked.token_ids), len(asked.token_ids) + 11  # the last token sampled is never computed
    assert sorted(seen) == list(range(stop))
    assert all(len(places) == 1 for places in seen.values())
    whole = subject.validator.spec.positions(asked.media)
    assert [next(iter(seen[index])) for index in range(stop)] == list(map(tuple, whole.slice(0, stop).T.tolist()))
    assert seen[end] == {(seen_last(seen, end) + 1,) * 3}


def seen_last(seen: dict[int, set[tuple[int, ...]]], end: int) -> int:
    """The largest position on any axis before token *end*."""
    return max(axis for index in range(end) for place in seen[index] for axis in place)


def test_an_encoder_output_serves_whoever_comes_later(shared: Engine, tiny_qwen3_vl: Path) -> None:  # D3, [eng] 5
    before = shared.load().encoded_items_total
    first = engines.request(tiny_qwen3_vl, [3, (SMALL, 51), 2, (SMALL, 52), 4], "AB", text_seed=1)
    second = engines.request(tiny_qwen3_vl, [4, (SMALL, 52), 2, (SMALL, 53), 4], "BC", text_seed=2)
    answer(shared, first)
    assert shared.load().encoded_items_total == before + 2
    answer(shared, second)
    assert shared.load().encoded_items_total == before + 3


def test_one_hash_with_two_grids_is_two_encoder_outputs(shared: Engine, tiny_qwen3_vl: Path) -> None:  # [eng] 9, 10
    """No honest gateway sends that: the hash covers all that decides the grid."""
    before = shared.load().encoded_items_total
    wide = engines.request(tiny_qwen3_vl, [4, (WIDE, 61), 3], "wide")
    tall = engines.request(tiny_qwen3_vl, [4, (TALL, 61), 3], "tall")
    assert wide.media[0].inline == tall.media[0].inline
    assert wide.media[0].content_hash == tall.media[0].content_hash
    small = engines.request(tiny_qwen3_vl, [4, (SMALL, 61), 3], "small")
    small = msgspec.structs.replace(
        small, media=(msgspec.structs.replace(small.media[0], content_hash=wide.media[0].content_hash),)
    )
    told = engines.drain(shared, wide, tall, small)
    assert {told.answers[name].finish_reason for name in ("wide", "tall", "small")} == {FinishReason.LENGTH}
    assert shared.load().encoded_items_total == before + 3


def test_hashes_of_requests_are_used_unchanged(shared: Engine, tiny_qwen3_vl: Path) -> None:  # [eng] 6, 12
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 71), 3])
    named = msgspec.structs.replace(asked.media[0], content_hash=b"of the gateway's own choice.....")
    sequence = shared.validator.validated(0, msgspec.structs.replace(asked, media=(named,)), 1)
    assert [image.key.content_hash for image in sequence.images] == [named.content_hash]
    assert [run.content_hash for run in sequence.runs] == [named.content_hash]


def test_modalities_share_no_encoder_output() -> None:  # [eng] 15
    image, audio = (EncoderKey(b"", modality, bytes(32), SMALL) for modality in ("image", "audio"))
    assert image != audio


def test_a_cpu_engine_touches_no_gpu(
    shared: Engine, tiny_qwen3_vl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # [eng] 22
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pinned memory needs an accelerator")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refuse)
    assert len(answer(shared, engines.request(tiny_qwen3_vl, [4, (SMALL, 81), 3]))) == 8
    assert not torch.cuda.is_initialized()


def test_a_cached_text_hides_no_image(plain: Engine, tiny_qwen3_vl: Path) -> None:  # B4, [eng] 23
    """The prefix is in the cache, the image behind it is not; then the image is, behind another text."""
    subject = engines.engine(tiny_qwen3_vl)
    text = engines.request(tiny_qwen3_vl, [64], "text")
    asked = engines.request(tiny_qwen3_vl, [64, (WIDE, 1), 5], "image")
    assert asked.token_ids[:64] == text.token_ids
    answer(subject, text)
    told = engines.drain(subject, asked).answers["image"]
    assert told.num_cached_tokens in (48, 64)
    assert subject.load().encoded_items_total == 1
    assert told.token_ids == answer(plain, asked)
    other = engines.request(tiny_qwen3_vl, [64, (WIDE, 2), 5], "other")
    assert answer(subject, other) == answer(plain, other)
    assert subject.load().encoded_items_total == 2


def test_images_of_one_step_are_bounded(tiny_qwen3_vl: Path) -> None:  # D4, [eng] 25
    subject = engines.engine(tiny_qwen3_vl, encode_budget_patches=70, max_num_batched_tokens=512)
    steps: list[list[int]] = []
    engines.steps_of(subject, lambda step: steps.append([prod(one.grid) for one in step.images]))
    parts: list[Any] = [part for seed in range(6) for part in ((SMALL, seed), 1)]
    told = engines.drain(
        subject,
        engines.request(tiny_qwen3_vl, [2, ((1, 10, 10), 91), 1], "big"),
        engines.request(tiny_qwen3_vl, [2, *parts], "many"),
    )
    assert {one.finish_reason for one in told.answers.values()} == {FinishReason.LENGTH}
    assert sorted(size for sizes in steps for size in sizes) == [24] * 6 + [100]
    assert all(sum(sizes) <= 70 or sizes == [100] for sizes in steps)


def test_an_abort_that_arrives_with_its_request_leaves_no_work(tiny_qwen3_vl: Path) -> None:  # [eng] 27
    subject = engines.engine(tiny_qwen3_vl)
    subject.requests.submit(0, engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 4], "aborted"))
    subject.requests.abort(0, "aborted")
    told = engines.drain(subject, engines.request(tiny_qwen3_vl, [5], "other", text_seed=9))
    assert told.answers["aborted"].finish_reason == FinishReason.ABORT
    load = subject.load()
    assert (load.encoded_items_total, load.steps_total) == (0, 8)


def test_a_batch_is_not_overwritten_by_the_next(shared: Engine, tiny_qwen3_vl: Path) -> None:  # [eng] 28
    """Each step's arrays are its own, so that a transfer still under way is never written over."""
    asked = engines.request(tiny_qwen3_vl, [4, (SMALL, 1), 4])
    sequence = shared.validator.validated(0, asked, 1)
    shared.scheduler.block_manager.admit(sequence, headroom_blocks=0)
    rows, buffers, cache = Rows(1), RowBuffers(1, torch.device("cpu")), EncoderCache(0)
    cache.begin_image(sequence.images[0].key, 0)
    builder = StepBuilder(rows, cache)
    batches, expected = [], []
    for num_tokens in (3, 5, 4):
        step = builder.build(Schedule({sequence: num_tokens})).step
        buffers.start_rows(step.started)
        buffers.change_tables(step.tables)
        batches.append(build_batch(step.chunks, buffers, 16, torch.device("cpu")))
        expected.append([tensor.clone() for tensor in (batches[-1].input_ids, batches[-1].positions)])
        sequence.num_launched_tokens = sequence.num_computed_tokens = sequence.num_computed_tokens + num_tokens
    shared.scheduler.block_manager.release_sequence(sequence)
    for batch, copies in zip(batches, expected, strict=True):
        assert all(map(torch.equal, (batch.input_ids, batch.positions), copies))
    assert len({batch.input_ids.untyped_storage().data_ptr() for batch in batches}) == 3


def test_twins_that_fold_their_blocks_answer_the_same(shared: Engine, plain: Engine, tiny_qwen3_vl: Path) -> None:
    """Both compute the same blocks in the same steps; one's table must then name the other's blocks."""  # [eng] 30
    twins = [engines.request(tiny_qwen3_vl, [40, (WIDE, 95), 9], name, max_tokens=20) for name in ("a", "b", "c")]
    expected = answer(plain, twins[0])
    shared_blocks = []

    def compare() -> None:
        tables = [list(sequence.block_table) for sequence in shared.scheduler.running]
        shared_blocks.append(len(tables) == 3 and tables[0][:3] == tables[1][:3] == tables[2][:3])

    told = engines.drain(shared, *twins, each_step=compare)
    assert any(shared_blocks)
    assert [told.answers[twin.request_id].token_ids for twin in twins] == [expected] * 3


def test_a_full_queue_refuses_and_the_others_go_on(tiny_qwen3_vl: Path) -> None:
    subject = engines.engine(tiny_qwen3_vl, max_num_waiting=2, max_num_seqs=1)
    asked = [engines.request(tiny_qwen3_vl, [5], str(number), text_seed=number) for number in range(4)]
    told = engines.drain(subject, *asked)
    assert {name: one.finish_reason for name, one in told.answers.items()} == {
        "0": FinishReason.LENGTH, "1": FinishReason.LENGTH, "2": FinishReason.ERROR, "3": FinishReason.ERROR,
    }  # fmt: skip
    failure = told.answers["2"].failure
    assert failure is not None
    assert failure.code == QueueFull.code
    assert len(engines.drain(subject, asked[2]).answers["2"].token_ids) == 8
