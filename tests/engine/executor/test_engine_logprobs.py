"""Log probabilities are the model's own, whatever the sampling, the chunks and the caches."""

from pathlib import Path
from typing import Any

import engines
import msgspec
import pytest
import torch
from references.networks import QwenOracle
from tables import table

from saccade.engine.executor import logprobs
from saccade.engine.loop import Engine
from saccade.protocol.output import TokenLogprob
from saccade.protocol.request import EngineRequest

WIDE = (1, 6, 16)


@pytest.fixture(scope="module")
def subject(tiny_qwen3_vl: Path) -> Engine:
    return engines.engine(tiny_qwen3_vl)


@pytest.fixture(scope="module")
def oracle(tiny_qwen3_vl: Path) -> QwenOracle:
    return QwenOracle(tiny_qwen3_vl)


@pytest.fixture
def asked(tiny_qwen3_vl: Path) -> EngineRequest:
    return engines.request(
        tiny_qwen3_vl, [7, (WIDE, 4), 11], max_tokens=5, num_logprobs=3, num_prompt_logprobs=2, text_seed=8
    )


def expected(oracle: QwenOracle, asked: EngineRequest, answer: list[int]) -> torch.Tensor:
    """transformers' log probabilities for every token of prompt and answer but the first."""
    first = msgspec.structs.replace(asked, token_ids=asked.token_ids[:1])
    return oracle.logits(first, asked.token_ids[1:] + answer).log_softmax(-1)


def check(found: list[TokenLogprob], token_ids: list[int], reference: torch.Tensor, num_top: int) -> None:
    """*found* tells of *token_ids* what *reference* [tokens, vocabulary] says."""
    assert len(found) == len(token_ids) == len(reference)
    for logprob, token_id, row in zip(found, token_ids, reference, strict=True):
        assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        # As likely as makes no difference: a rank may differ where two logits do not.
        assert (row > row[token_id] + 1e-4).sum() < logprob.rank <= (row > row[token_id] - 1e-4).sum()
        assert logprob.top_logprobs == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
        assert row[logprob.top_ids].tolist() == pytest.approx(logprob.top_logprobs, abs=1e-4)


@pytest.mark.ci
@table("chunk", [1, 3, 16, 512])
@table("preempted_at", [None, 2, 4])
def test_prompt_and_answer_equal_transformers(
    tiny_qwen3_vl: Path, oracle: QwenOracle, asked: EngineRequest, chunk: int, preempted_at: int | None
) -> None:
    subject = engines.engine(tiny_qwen3_vl, max_num_batched_tokens=chunk, max_num_seqs=1)

    def preempt() -> None:
        if subject.load().steps_total == preempted_at:
            for sequence in list(subject.scheduler.running):
                subject.scheduler.preempt(sequence)

    answer = engines.drain(subject, asked, each_step=preempt).answers["a"]
    assert (subject.load().preemptions_total > 0) == (preempted_at is not None)
    reference, length = expected(oracle, asked, answer.token_ids), len(asked.token_ids)
    check(answer.prompt_logprobs, asked.token_ids[1:], reference[: length - 1], 2)
    check(answer.logprobs, answer.token_ids, reference[length - 1 :], 3)


def test_a_cached_prompt_is_computed_again_for_its_log_probabilities(subject: Engine, asked: EngineRequest) -> None:
    first = engines.drain(subject, asked).answers["a"]
    again = engines.drain(subject, asked).answers["a"]
    assert first.num_cached_tokens == again.num_cached_tokens == 0
    assert len(again.prompt_logprobs) == len(asked.token_ids) - 1
    assert again.token_ids == first.token_ids


def test_sampling_changes_no_log_probability(
    subject: Engine, oracle: QwenOracle, asked: EngineRequest, tiny_qwen3_vl: Path
) -> None:
    shaping: dict[str, Any] = {
        "temperature": 1.8, "seed": 5, "top_k": 40, "presence_penalty": 2.0, "logit_bias": {9: 50.0, 10: 50.0},
    }  # fmt: skip
    shaped = msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, **shaping))
    other = engines.request(tiny_qwen3_vl, [9], "other", temperature=1.0, seed=1)
    answers = engines.drain(subject, other, shaped).answers
    answer = answers["a"]
    assert set(answer.token_ids) == {9, 10}
    check(answer.logprobs, answer.token_ids, expected(oracle, asked, answer.token_ids)[len(asked.token_ids) - 1 :], 3)
    assert answers["other"].logprobs == answers["other"].prompt_logprobs == []


@pytest.mark.parametrize(("wanted", "tops"), [(0, 0), (1, 1), (20, 20)])
def test_each_request_gets_its_own_number_of_log_probabilities(
    subject: Engine, tiny_qwen3_vl: Path, wanted: int, tops: int
) -> None:
    mine = engines.request(tiny_qwen3_vl, [6], "mine", 1, num_logprobs=wanted)
    others = [
        engines.request(tiny_qwen3_vl, [6], f"{number}", 2, num_logprobs=number, num_prompt_logprobs=4)
        for number in (2, 7)
    ]
    answer = engines.drain(subject, *others, mine).answers["mine"]
    assert len(answer.logprobs) == len(answer.token_ids)
    assert all(len(one.top_ids) == len(one.top_logprobs) == tops for one in answer.logprobs)
    assert all(one.rank == 1 for one in answer.logprobs)  # greedy
    assert answer.prompt_logprobs == []


def test_logits_of_a_prompt_are_computed_in_pieces(
    subject: Engine, asked: EngineRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    network: Any = engines.local(subject).runner.network
    sizes: list[int] = []
    whole = engines.drain(subject, asked).answers["a"]
    compute = network.logits

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(logprobs, "PIECE_LOGITS", 5 * network.spec.vocab_size)
    monkeypatch.setattr(network, "logits", counting)
    pieces = engines.drain(subject, asked).answers["a"]
    assert max(sizes) == 5
    assert sum(sizes) == len(asked.token_ids) - 1 + len(pieces.token_ids)
    assert [one.rank for one in pieces.prompt_logprobs] == [one.rank for one in whole.prompt_logprobs]
