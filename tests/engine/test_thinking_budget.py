"""Reasoning ends when its budget is used up, whatever else the request asks for. F13"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import jsonschema_rs
import msgspec
import pytest
import recordings
from tables import table

from saccade.engine.loop import Engine
from saccade.engine.vocabulary import read_vocabulary
from saccade.models.files import read_model_files
from saccade.protocol.output import FinishReason
from saccade.protocol.request import EngineRequest, Grammar, ThinkingBudget

END_ID = 7


@pytest.fixture(scope="module")
def subject(tiny_qwen3_vl: Path) -> Iterator[Engine]:
    subject = engines.engine(tiny_qwen3_vl)
    yield subject
    subject.close()


def asked(folder: Path, budget: ThinkingBudget | None = None, name: str = "a", **sampling: Any) -> EngineRequest:
    """A request drawn at random, of which the end of the reasoning is unlikely."""
    wanted = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "logit_bias": {END_ID: -100.0}, **sampling}
    return engines.request(folder, [40], name, thinking_budget=budget, **wanted)


def tokens(subject: Engine, request: EngineRequest) -> list[int]:
    return engines.drain(subject, request).answers[request.request_id].token_ids


@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_end_of_reasoning_is_forced_once(num_tokens: int, subject: Engine, tiny_qwen3_vl: Path) -> None:
    free = tokens(subject, asked(tiny_qwen3_vl))
    held = tokens(subject, asked(tiny_qwen3_vl, ThinkingBudget(num_tokens, END_ID)))
    assert held[: num_tokens + 1] == [*free[:num_tokens], END_ID]
    assert held.count(END_ID) == 1
    assert len(held) == len(free) == 24


@table("sampling", [
    {"min_tokens": 20, "stop_token_ids": (END_ID,)}, {"temperature": 0}, {"top_k": 1}, {"num_logprobs": 3},
    {"repetition_penalty": 2.0}, {"allowed_token_ids": (3, END_ID)},
])  # fmt: skip
def test_the_budget_comes_before_other_parameters(
    sampling: dict[str, Any], subject: Engine, tiny_qwen3_vl: Path
) -> None:
    answer = engines.drain(subject, asked(tiny_qwen3_vl, ThinkingBudget(5, END_ID), **sampling)).answers["a"]
    assert answer.token_ids.index(END_ID) == 5
    assert len(answer.logprobs) == (len(answer.token_ids) if "num_logprobs" in sampling else 0)


def test_reasoning_that_ends_by_itself_is_left_alone(subject: Engine, tiny_qwen3_vl: Path) -> None:
    free = tokens(subject, asked(tiny_qwen3_vl))
    assert tokens(subject, asked(tiny_qwen3_vl, ThinkingBudget(9, free[4]))) == free


def test_budget_begins_at_a_start_token_in_the_answer(subject: Engine, tiny_qwen3_vl: Path) -> None:
    free = tokens(subject, asked(tiny_qwen3_vl))
    held = tokens(subject, asked(tiny_qwen3_vl, ThinkingBudget(4, END_ID, start_id=free[0])))
    assert held[:6] == [*free[:5], END_ID]
    assert tokens(subject, asked(tiny_qwen3_vl, ThinkingBudget(4, END_ID, start_id=free[0] + 1))) == free


def test_samples_and_the_prefix_cache(subject: Engine, tiny_qwen3_vl: Path) -> None:
    request = msgspec.structs.replace(asked(tiny_qwen3_vl, ThinkingBudget(5, END_ID)), num_samples=3)
    first, again = engines.drain(subject, request).answers, engines.drain(subject, request).answers
    assert len({tuple(answer.token_ids) for answer in first.values()}) == 3
    for name, answer in first.items():
        assert answer.token_ids.index(END_ID) == 5
        assert again[name].token_ids == answer.token_ids
    assert again["a"].num_cached_tokens > 0


def test_preemption_does_not_change_the_end_of_reasoning(subject: Engine, tiny_qwen3_vl: Path) -> None:
    budget = ThinkingBudget(50, END_ID)
    requests = [asked(tiny_qwen3_vl, budget, name, seed=seed, max_tokens=70) for seed, name in enumerate("abcd")]
    alone = {request.request_id: tokens(subject, request) for request in requests}
    tight = engines.engine(tiny_qwen3_vl, num_blocks=10, max_model_len=128)
    together = engines.drain(tight, *requests).answers
    assert tight.load().preemptions_total > 0
    assert {name: answer.token_ids for name, answer in together.items()} == alone
    assert all(answer[50] == END_ID for answer in alone.values())
    tight.close()


def test_grammar_begins_after_the_forced_end(subject: Engine, tiny_qwen3_vl: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "additionalProperties": False}
    grammar = Grammar("json_schema", json.dumps(schema), reasoning_end_id=END_ID)
    request = asked(tiny_qwen3_vl, ThinkingBudget(6, END_ID), grammar=grammar, max_tokens=300)
    answer = engines.drain(subject, request).answers["a"]
    vocabulary = read_vocabulary(read_model_files(tiny_qwen3_vl), subject.validator.spec.vocab_size)
    assert (answer.token_ids.index(END_ID), answer.finish_reason) == (6, FinishReason.STOP)
    special = frozenset(vocabulary.special_token_ids)
    said = b"".join(vocabulary.tokens[token_id] for token_id in answer.token_ids[7:] if token_id not in special)
    assert jsonschema_rs.is_valid(schema, json.loads(said))


def test_thinking_budget_is_recorded_and_replayed(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    with recordings.recording_engine(tiny_qwen3_vl, tmp_path) as recorded:
        answer = tokens(recorded, asked(tiny_qwen3_vl, ThinkingBudget(5, END_ID)))
    assert answer[5] == END_ID
    outcome = recordings.replayed(recordings.segments(tmp_path)[0])
    assert (outcome.first, outcome.num_tokens) == (None, len(answer))


@pytest.mark.parametrize("sampling", [
    {"budget": ThinkingBudget(-1, END_ID)}, {"budget": ThinkingBudget(1, 10**6)},
    {"budget": ThinkingBudget(1, END_ID), "allowed_token_ids": (3,)},
])  # fmt: skip
def test_budget_without_an_end_token_is_refused(sampling: dict[str, Any], subject: Engine, tiny_qwen3_vl: Path) -> None:
    failure = engines.drain(subject, asked(tiny_qwen3_vl, **sampling)).answers["a"].failure
    assert failure is not None
    assert (failure.code, failure.param) == ("invalid_value", "thinking_budget")


def test_workers_say_whether_they_end_reasoning(subject: Engine, tiny_qwen3_vl: Path) -> None:
    assert subject.description.takes_thinking_budgets
    prefill = engines.engine(tiny_qwen3_vl, role="prefill", kv_transfer_bind="127.0.0.1:0")
    assert not prefill.description.takes_thinking_budgets
    prefill.close()
