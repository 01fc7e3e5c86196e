"""Tokens that are proposed and verified together: no answer depends on them, whatever a request asks for. F17"""

import random
from collections.abc import Callable, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import recordings
from tables import table
from test_step_ahead import asked

from saccade.engine.core.sequence import Sequence
from saccade.engine.core.speculation import SHARE, PromptLookup, Speculation
from saccade.engine.loop import Engine
from saccade.engine.speculative_config import SpeculativeConfig
from saccade.errors import StartupError
from saccade.models.positions import MultimodalPositions
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest, SamplingParams

NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}'


def comparable(answers: Mapping[str, engines.Answer]) -> dict[str, Any]:
    """What must be equal; the last digits of log probabilities depend on the shapes of batches."""
    return {
        name: (
            answer.token_ids,
            answer.finish_reason,
            [[round(one.logprob, 3), one.rank, one.top_ids] for one in (*answer.logprobs, *answer.prompt_logprobs)],
        )
        for name, answer in answers.items()
    }


@pytest.fixture(scope="module")
def plain(tiny_qwen3_vl: Path) -> dict[str, engines.Answer]:
    """The answers without proposals."""
    return engines.drain(engines.engine(tiny_qwen3_vl), *asked(tiny_qwen3_vl)).answers


@table(
    ("wrong", "settings"),
    [
        (0, {}),
        (3, {"max_num_batched_tokens": 32}),
        (2, {"async_scheduling": True}),
        (4, {"num_blocks": 9, "max_model_len": 140}),
    ],
)
def test_scripted_proposals_change_no_answer(
    wrong: int, settings: dict[str, Any], tiny_qwen3_vl: Path, plain: dict[str, engines.Answer]
) -> None:
    """Samples, images, penalties, biases, grammars, log probabilities and limits in one batch."""
    subject = engines.speculating(engines.engine(tiny_qwen3_vl, **settings), plain, wrong)
    outcome = engines.drain(subject, *asked(tiny_qwen3_vl))
    assert comparable(outcome.answers) == comparable(plain)
    load = subject.load()
    assert load.generated_tokens_total == sum(len(answer.token_ids) for answer in plain.values())
    assert 0 < load.accepted_tokens_total <= load.draft_tokens_total
    assert engines.is_idle(subject)
    if not wrong:
        assert outcome.steps < 10


def test_prompt_lookup_changes_no_answer(tiny_qwen3_vl: Path, plain: dict[str, engines.Answer]) -> None:
    repeating = engines.request(tiny_qwen3_vl, [40], "repeating", max_tokens=80)
    subject = engines.engine(tiny_qwen3_vl, speculative_config=NGRAM)
    found = engines.drain(subject, *asked(tiny_qwen3_vl), repeating).answers
    [alone] = engines.drain(engines.engine(tiny_qwen3_vl), repeating).answers.values()
    assert comparable(found) == comparable({**plain, "repeating": alone})
    assert subject.load().accepted_tokens_total > 0


def test_the_engine_times_steps_that_only_decode(tiny_qwen3_vl: Path) -> None:
    """A step takes a second here, whatever it computes, and only those of one token were measured."""
    subject, ticks = engines.engine(tiny_qwen3_vl), count()
    subject.scheduler.speculation = speculation = Speculation(PromptLookup(), 4)
    subject.clock = lambda: float(next(ticks))  # type: ignore[assignment]
    engines.drain(subject, engines.request(tiny_qwen3_vl, [40], "a", max_tokens=5))
    assert [speculation.times.of(num_tokens) for num_tokens in (1, 40)] == [1, 40]


def test_answers_end_within_accepted_tokens(tiny_qwen3_vl: Path, plain: dict[str, engines.Answer]) -> None:
    cut, known = [], {}
    for one in asked(tiny_qwen3_vl):
        ids = plain[one.request_id].token_ids
        for name, limit in (("length", {"max_tokens": 7}), ("stop", {"stop_token_ids": tuple(ids[5:6])})):
            sampling = msgspec.structs.replace(one.sampling, **limit)
            cut.append(msgspec.structs.replace(one, request_id=f"{name} {one.request_id}", sampling=sampling))
            known |= {f"{name} {key}": value for key, value in plain.items() if key.split("#")[0] == one.request_id}
    alone, subject = engines.engine(tiny_qwen3_vl), engines.speculating(engines.engine(tiny_qwen3_vl), known)
    expected = engines.drain(alone, *cut).answers
    assert comparable(engines.drain(subject, *cut).answers) == comparable(expected)
    assert {answer.finish_reason for answer in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert subject.load().generated_tokens_total == alone.load().generated_tokens_total


def test_only_verified_tokens_are_in_the_prefix_cache(tiny_qwen3_vl: Path) -> None:
    """The last block of an answer would be full with the proposals that are not accepted."""
    requests = [
        engines.request(tiny_qwen3_vl, [length], str(length), length, max_tokens=24) for length in (5, 16, 30, 47)
    ]
    alone = engines.engine(tiny_qwen3_vl)
    known = engines.drain(alone, *requests).answers
    subject = engines.speculating(engines.engine(tiny_qwen3_vl), known, wrong=2)
    engines.drain(subject, *requests)
    stored = [
        {event.key for event in engine.scheduler.block_manager.paged_blocks.snapshot()} for engine in (alone, subject)
    ]
    assert stored[0] == stored[1]
    assert len(stored[0]) == sum((len(one.token_ids) + 23) // 16 for one in requests)


@pytest.mark.ci
def test_recurrent_states_after_accepted_tokens_go_on(network_folder: Callable[[str], Path]) -> None:
    """A row goes on from the state after its last accepted token; no checkpoint at a block's end has a wrong token."""
    folder = network_folder("qwen3_5")
    settings: dict[str, Any] = {"state_snapshot_blocks": 1, "num_state_snapshots": 8, "num_blocks": 64}
    prompts: list[list[Any]] = [[5], [((96, 64), 1), 9], [30]]
    requests = [engines.request(folder, one, str(number), number, max_tokens=36) for number, one in enumerate(prompts)]

    def answers(subject: Engine) -> dict[str, engines.Answer]:
        first = engines.drain(engines.poison(subject), *requests).answers
        longer = [
            msgspec.structs.replace(
                one, request_id=one.request_id * 2, token_ids=one.token_ids + first[one.request_id].token_ids
            )
            for one in requests
        ]
        return first | engines.drain(subject, *longer).answers

    plain = answers(engines.engine(folder, **settings))
    assert all(plain[name * 2].num_cached_tokens for name in "012")
    for wrong in (0, 3):
        subject = engines.speculating(engines.engine(folder, speculative_config=NGRAM, **settings), plain, wrong)
        found = answers(subject)
        assert comparable(found) == comparable(plain)
        assert [one.num_cached_tokens for one in found.values()] == [one.num_cached_tokens for one in plain.values()]
        assert subject.load().accepted_tokens_total > 0


@pytest.mark.ci
def test_recorded_proposals_are_replayed_equal(
    tiny_qwen3_vl: Path, plain: dict[str, engines.Answer], tmp_path: Path
) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as subject:
        engines.drain(engines.speculating(subject, plain, wrong=3), *asked(tiny_qwen3_vl))
    [file] = recordings.segments(tmp_path)
    outcome = recordings.replayed(file)
    assert (outcome.first, len(outcome.sequence_ids)) == (None, len(plain))


def sequence(*token_ids: int) -> Sequence:
    request = EngineRequest(request_id="a", token_ids=list(token_ids), sampling=SamplingParams(max_tokens=10**6))
    subject = Sequence(0, request, 1, 0, b"", MultimodalPositions([]))
    subject.token_ids.append(0)
    return subject


class Always:
    """Proposes the same token again and again."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return [1] * most


def relative_time(rights: list[float], added: float) -> float:
    """The time for a token of one of several rows, as a multiple of that without proposals.

    Row i accepts a proposal with the probability rights[i]. A proposal lengthens a step by the part *added*.
    """
    subject, rng = Speculation(Always(), 4), random.Random(0)
    rows = [(sequence(1, 2), right) for right in rights]
    seconds, num_drawn = 0.0, 0
    while num_drawn < 2000 * len(rows):
        num_proposed: list[int] = []
        for one, _ in rows:
            prices = subject.times.prices(len(rows), len(rows) + sum(num_proposed))
            proposal = subject.proposal(one, 99, prices)
            num_proposed.append(0 if proposal is None else len(proposal.token_ids))
        of_step = 1 + added * sum(num_proposed)
        subject.times.add(len(rows) + sum(num_proposed), of_step)
        seconds += of_step
        for (one, right), most in zip(rows, num_proposed, strict=True):
            tries = (rng.random() for _ in range(most))
            num_accepted = sum(1 for _ in takewhile(right.__gt__, tries))
            if most:
                subject.note(one, num_accepted)
            one.token_ids.extend([0] * (1 + num_accepted))
            num_drawn += 1 + num_accepted
    return seconds * len(rows) / num_drawn


@table("added", [0.0, 0.05, 0.3, 1.0])
@table("rights", [[0.0], [0.3], [0.8], [0.0] * 4, [0.5] * 4, [0.0, 0.0, 0.0, 1.0]])
def test_wrong_proposals_cost_a_small_part_of_the_time(rights: list[float], added: float) -> None:
    assert relative_time(rights, added) < 1.001 + SHARE


@table(
    ("rights", "added", "most"),
    [
        ([1.0], 0.05, 0.27),  # five tokens in 1.2 times the time of one
        ([1.0], 0.3, 0.48),
        ([0.6], 0.05, 0.57),
        ([1.0] * 4, 0.05, 0.4),
        ([0.0, 0.0, 0.0, 1.0], 0.01, 0.6),
    ],
)
def test_proposals_that_are_right_save_time(rights: list[float], added: float, most: float) -> None:
    assert relative_time(rights, added) <= most


@table(
    ("longest", "token_ids", "proposed"),
    [
        (3, [1, 2, 3, 4, 5, 9, 1, 2, 3], [4, 5, 9]),
        (3, [1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3], [5, 8, 1]),  # the last occurrence
        (3, [9, 1, 2, 3, 4, 4, 4, 8, 2, 3, 5, 1, 2, 3], [4, 4, 4]),  # the longest run
        (3, [8, 2, 3, 5, 6, 7, 1, 2, 3], [5, 6, 7]),
        (3, [1, 2, 3, 4, 5, 6], []),
        (3, [7, 8, 7, 8, 7], [8, 7, 8]),  # the repetition goes on
        (3, [5, 5, 5], [5, 5, 5]),
        (2, [3, 9], []),
    ],
)
def test_what_followed_the_last_tokens_is_proposed(longest: int, token_ids: list[int], proposed: list[int]) -> None:
    subject, one = PromptLookup(shortest=2, longest=longest), sequence()
    one.token_ids.clear()
    found: list[int] = []
    for token_id in token_ids:
        one.token_ids.append(token_id)
        found = list(subject.propose(one, 3))
    assert found == proposed


@table(
    ("text", "fault"),
    [
        ('{"num_speculative_tokens": 0}', "whole numbers of at least 1"),
        ("{}", "num_speculative_tokens"),
        ('{"num_speculative_tokens": 2, "prompt_lookup_min": "a"}', "whole numbers"),
        ('{"num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 2}', "must not be over"),
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "'eagle3' is not known"),
        ('{"method": ["ngram"], "num_speculative_tokens": 2}', "is not known"),
        ('{"method": null}', "is not known"),
        ('{"num_speculative_tokens": true}', "whole numbers"),
        ('{"method": "mtp", "num_speculative_tokens": 0}', "at least 1"),
        ('{"method": "qwen3_5_mtp", "prompt_lookup_max": 2}', "takes num_speculative_tokens alone"),
        ('{"num_speculative_tokens": 2, "model": "x"}', "a draft `model` is not served; leave it out"),
        ('{"method": "eagle3", "model": "x", "num_speculative_tokens": 2}', "a draft `model` is not served"),
        ('{"num_speculative_tokens": 2, "disable_padded_drafter_batch": true}', "does not take disable_padded"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(text: str, fault: str) -> None:
    with pytest.raises(StartupError, match=fault) as error:
        SpeculativeConfig.read_option(text)
    assert "--speculative-config" in error.value.message
